"""Environments in subprocesses, for environments that are CPU-bound in Python, leak memory, or may crash.

    environment:
      _target_: components.environments.processes.InProcesses
      environment:
        _target_: my_package.worlds.Heavy
        size: 40

Each instance has one subprocess. Its computation blocks neither other episodes nor the engine. When a subprocess dies,
its episode fails and a new subprocess replaces it. A step that exceeds `collect.step_timeout` kills the subprocess.
Scenarios, tools, seeds and results are identical to those of the wrapped environment.

Subprocess and collector exchange JSON over a socket; nothing is unpickled. Responses of the subprocess are untrusted:
their size is limited, and they are validated like those of any environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from components.environments.protocol import Messages, Step
from components.errors import EnvironmentAway, EnvironmentFailed, Problem, ResourceError, SpecError
from components.exceptions import passes
from components.specs import Target, validate
from components.specs.registered import registered
from components.trajectories.schema import Scenario

MAX_ANSWER = 64 * 2**20
"""Maximum size of one response of a subprocess, in bytes."""
START = 120.0
"""Timeout for building the environment in the subprocess, in seconds."""
HEAD = struct.Struct("!I")
"""Message header: length of the body in bytes."""
CLOSING = 3.0
"""Time that the environment has to close in its subprocess, in seconds."""
OPTIONAL = ("solve", "save", "restore")
"""Optional methods of an environment."""


@registered("environment.in_processes")
class InProcesses:
    """An environment whose instances run in subprocesses.

    Args:
        environment: Target of the wrapped environment.
        processes: Maximum number of concurrent subprocesses, and therefore of concurrent episodes; null takes the
            number of CPUs.
    """

    lasting = True

    def __init__(self, environment: Target, processes: Annotated[int, Field(ge=1)] | None = None):
        self.instances = processes or os.cpu_count() or 1
        self._target = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._waiting = False
        inside = environment.factory()
        self.good_for = getattr(inside, "good_for", None)
        for name in OPTIONAL:
            if hasattr(inside, name):
                setattr(self, name, getattr(self, f"_{name}"))

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that determine results; `processes` does not."""
        return {"environment": arguments["environment"]}

    async def scenarios(self, split: str) -> Sequence[Scenario]:
        return [Scenario(**fields) for fields in await self._ask("scenarios", split)]

    async def tools(self) -> Any:
        return await self._ask("tools")

    async def reset(self, scenario: Scenario) -> Messages:
        return await self._ask("reset", _plain(scenario))

    async def step(self, action: dict[str, Any]) -> Step:
        result = await self._ask("step", action)
        return Step(**result) if isinstance(result, dict) and set(result) == set(Step.__slots__) else result

    async def close(self) -> None:
        process, connection = self._process, self._socket
        self._process = self._socket = None
        if process is None or connection is None:
            return
        if self._waiting:  # an abandoned call still runs there
            process.kill()
        connection.close()  # the subprocess closes its environment and exits
        try:
            await asyncio.to_thread(process.wait, 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _solve(self, scenario: Scenario) -> Any:
        return await self._ask("solve", _plain(scenario))

    async def _save(self) -> Any:
        return await self._ask("save")

    async def _restore(self, scenario: Scenario, state: Any) -> None:
        await self._ask("restore", _plain(scenario), state)

    async def _ask(self, name: str, *arguments: Any) -> Any:
        """Return the result of a method of the wrapped environment.

        Raises EnvironmentFailed if the method raises or the subprocess dies; SpecError, ResourceError and
        EnvironmentAway keep their class.
        """
        if self._waiting:
            raise EnvironmentFailed(f"{name}: the environment is busy: its subprocess still runs an abandoned call")
        connection = self._socket
        self._waiting = True
        if connection is None:
            connection = await self._start()
        try:
            await _send(connection, [name, *arguments])
            kind, result = await _receive(connection)
        except (OSError, EOFError):
            raise EnvironmentFailed(f"{name}: {await self._kill()}") from None
        self._waiting = False
        if kind == "returned":
            return result
        raise _exception(kind, result)

    async def _start(self) -> socket.socket:
        connection, remote = socket.socketpair()
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(remote.fileno())],
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout of the environment must not mix with the output of the run
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        connection.setblocking(False)
        self._socket = connection
        data = self._target.model_dump()
        try:
            async with asyncio.timeout(START):
                await _send(connection, [data, sorted(_packages(data))])
                kind, result = await _receive(connection)
        except TimeoutError:
            raise EnvironmentFailed(
                f"{self._target.target}: building the environment in its subprocess timed out after {START:g} s"
            ) from None
        except (OSError, EOFError):
            raise EnvironmentFailed(f"{self._target.target}: {await self._kill()}") from None
        if kind != "returned":
            raise _exception(kind, result)
        return connection

    async def _kill(self) -> str:
        """Kill the subprocess after a broken connection; return the reason for an error message."""
        process = self._process
        assert process is not None
        process.kill()
        code = await asyncio.to_thread(process.wait)
        return f"its subprocess died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def _packages(data: Any) -> set[str]:
    """Return the top-level packages of all targets in a configuration."""
    if isinstance(data, dict):
        packages = {str(data["_target_"]).partition(".")[0]} if "_target_" in data else set()
        return packages.union(*map(_packages, data.values()))
    return set().union(*map(_packages, data)) if isinstance(data, list) else set()


def _plain(scenario: Scenario) -> dict[str, Any]:
    return {name: getattr(scenario, name) for name in Scenario.__slots__}


def _exception(kind: Any, detail: Any) -> Exception:
    """Return the exception that the subprocess reported."""
    if kind == "SpecError":
        return SpecError([Problem(str(path), str(message)) for path, message in detail])
    kinds: dict[Any, type[Exception]] = {"ResourceError": ResourceError, "EnvironmentAway": EnvironmentAway}
    return kinds.get(kind, EnvironmentFailed)(str(detail))


async def _send(connection: socket.socket, data: Any) -> None:
    content = json.dumps(data).encode()
    await asyncio.get_running_loop().sock_sendall(connection, HEAD.pack(len(content)) + content)


async def _receive(connection: socket.socket) -> tuple[Any, Any]:
    (length,) = HEAD.unpack(await _read(connection, HEAD.size))
    if length > MAX_ANSWER:
        raise EOFError
    message = json.loads(await _read(connection, length))
    if not isinstance(message, list) or len(message) != 2:
        raise EOFError
    return message[0], message[1]


async def _read(connection: socket.socket, count: int) -> bytes:
    loop, content = asyncio.get_running_loop(), bytearray()
    while len(content) < count:
        part = await loop.sock_recv(connection, min(count - len(content), 2**20))
        if not part:
            raise EOFError
        content += part
    return bytes(content)


# Code that runs in the subprocess


def main(descriptor: int) -> None:
    """Build the requested environment and serve calls of its methods until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when the subprocess exits
    connection = socket.socket(fileno=descriptor)
    requests: list[Any] = []
    arrival = threading.Condition()
    threading.Thread(target=_listen, args=(connection, requests, arrival), daemon=True).start()

    def next_request() -> Any:
        with arrival:
            arrival.wait_for(lambda: requests)
            return requests.pop(0)

    def respond(kind: str, result: Any) -> None:
        try:
            content = json.dumps([kind, result], default=float).encode()
        except (TypeError, ValueError, RecursionError) as error:
            content = json.dumps(["EnvironmentFailed", f"the result is not JSON-serializable: {error}"]).encode()
        with contextlib.suppress(OSError):
            connection.sendall(HEAD.pack(len(content)) + content)

    if (first := next_request()) is None:
        return
    with asyncio.Runner() as runner:
        environment = _serve(respond, lambda: _build(*first), runner, send_result=False)
        while environment is not None and (request := next_request()) is not None:
            name, *arguments = request
            if name in ("reset", "solve", "restore"):
                arguments[0] = Scenario(**arguments[0])
            _serve(respond, lambda: getattr(environment, name)(*arguments), runner)  # noqa: B023  called at once
        with contextlib.suppress(Exception):
            _result(environment.close(), runner)


def _build(target: dict[str, Any], packages: list[str]) -> Any:
    return validate(Target, target, allow=packages).build()


def _serve(
    respond: Callable[[str, Any], None], work: Callable[[], Any], runner: asyncio.Runner, send_result: bool = True
) -> Any:
    """Run `work` and respond with its result or its exception; return the result, None after an exception."""
    try:
        result = _result(work(), runner)
    except SpecError as error:
        respond("SpecError", [[problem.path, problem.message] for problem in error.problems])
        return None
    except Exception as error:  # noqa: BLE001  exceptions of an environment are data
        classified = isinstance(error, EnvironmentFailed | ResourceError)
        away = isinstance(error, EnvironmentAway) or (not classified and passes(error))
        kind = "ResourceError" if isinstance(error, ResourceError) else "EnvironmentFailed"
        respond("EnvironmentAway" if away else kind, str(error) if classified else f"{type(error).__name__}: {error}")
        return None
    respond("returned", _data(result) if send_result else None)
    return result


def _result(value: Any, runner: asyncio.Runner) -> Any:
    async def resolve() -> Any:
        return await value

    return runner.run(resolve()) if asyncio.iscoroutine(value) else value


def _data(result: Any) -> Any:
    """Convert steps and scenarios to JSON data."""
    if isinstance(result, Step):
        return {name: getattr(result, name) for name in Step.__slots__}
    if isinstance(result, list | tuple) and any(isinstance(item, Scenario) for item in result):
        return [_plain(item) for item in result]
    return result


def _listen(connection: socket.socket, requests: list[Any], arrival: threading.Condition) -> None:
    """Queue incoming requests. Exit the subprocess when the parent closes the connection, also during a step."""
    with connection.makefile("rb") as file:
        while len(head := file.read(HEAD.size)) == HEAD.size:
            request = json.loads(file.read(*HEAD.unpack(head)))
            with arrival:
                requests.append(request)
                arrival.notify()
    with arrival:
        requests.append(None)
        arrival.notify()
    time.sleep(CLOSING)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
