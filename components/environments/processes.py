"""An environment in processes of its own: for one that computes in Python, leaks, or may crash.

    environment:
      _target_: components.environments.processes.InProcesses
      environment:
        _target_: my_package.worlds.Heavy
        size: 40

Every instance has a process. What it computes holds up no other episode, nor the engine; where it dies, its episode
has failed and another process takes its place; where a step takes too long (`collect.step_timeout`), the process is
killed. Nothing else changes: scenarios, tools, seeds and results are those of the environment inside.

Process and collector exchange JSON over a socket, nothing is unpickled. What the process says is untrusted: answers are
limited in size and are taken apart as any environment's are.
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
"""Bytes of one answer of a process."""
START = 120.0
"""Seconds that a process may take to build its environment."""
HEAD = struct.Struct("!I")
"""Length of what follows."""
CLOSING = 3.0
"""Seconds that an environment has to close in its process."""
OPTIONAL = ("solve", "save", "restore")
"""Methods that an environment may have."""


@registered("environment.in_processes")
class InProcesses:
    """environment: what runs in a process. processes: most at once, and so most episodes; null: as many as there are
    processors."""

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
        """For stage keys: how many there are decides nothing."""
        return {"environment": arguments["environment"]}

    async def scenarios(self, split: str) -> Sequence[Scenario]:
        return [Scenario(**one) for one in await self._ask("scenarios", split)]

    async def tools(self) -> Any:
        return await self._ask("tools")

    async def reset(self, scenario: Scenario) -> Messages:
        return await self._ask("reset", _plain(scenario))

    async def step(self, action: dict[str, Any]) -> Step:
        found = await self._ask("step", action)
        return Step(**found) if isinstance(found, dict) and set(found) == set(Step.__slots__) else found

    async def close(self) -> None:
        process, line = self._process, self._socket
        self._process = self._socket = None
        if process is None or line is None:
            return
        if self._waiting:  # whatever it does there, nobody waits for it any more
            process.kill()
        line.close()  # and it ends, having closed its environment
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
        """What a method of the environment inside returns. Raises what it raises, as EnvironmentFailed."""
        if self._waiting:
            raise EnvironmentFailed(f"{name} of an environment that is busy still: its process was left in a call")
        line = self._socket
        self._waiting = True
        if line is None:
            line = await self._start()
        try:
            await _send(line, [name, *arguments])
            kind, found = await _receive(line)
        except (OSError, EOFError):
            raise EnvironmentFailed(f"{name}: {await self._died()}") from None
        self._waiting = False
        if kind == "returned":
            return found
        raise _raised(kind, found)

    async def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints is no result of ours
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        ours.setblocking(False)
        self._socket = ours
        data = self._target.model_dump()
        try:
            async with asyncio.timeout(START):
                await _send(ours, [data, sorted(_packages(data))])
                kind, found = await _receive(ours)
        except TimeoutError:
            raise EnvironmentFailed(f"{self._target.target} was not built within {START:g} s, in its process") from None
        except (OSError, EOFError):
            raise EnvironmentFailed(f"{self._target.target}: {await self._died()}") from None
        if kind != "returned":
            raise _raised(kind, found)
        return ours

    async def _died(self) -> str:
        process = self._process
        assert process is not None
        process.kill()
        code = await asyncio.to_thread(process.wait)
        return f"its process died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def _packages(data: Any) -> set[str]:
    """From which the targets in a configuration come."""
    if isinstance(data, dict):
        own = {str(data["_target_"]).partition(".")[0]} if "_target_" in data else set()
        return own.union(*map(_packages, data.values()))
    return set().union(*map(_packages, data)) if isinstance(data, list) else set()


def _plain(scenario: Scenario) -> dict[str, Any]:
    return {name: getattr(scenario, name) for name in Scenario.__slots__}


def _raised(kind: Any, found: Any) -> Exception:
    """What the process says that was raised there."""
    if kind == "SpecError":
        return SpecError([Problem(str(path), str(message)) for path, message in found])
    kinds: dict[Any, type[Exception]] = {"ResourceError": ResourceError, "EnvironmentAway": EnvironmentAway}
    return kinds.get(kind, EnvironmentFailed)(str(found))


async def _send(line: socket.socket, data: Any) -> None:
    content = json.dumps(data).encode()
    await asyncio.get_running_loop().sock_sendall(line, HEAD.pack(len(content)) + content)


async def _receive(line: socket.socket) -> tuple[Any, Any]:
    (length,) = HEAD.unpack(await _read(line, HEAD.size))
    if length > MAX_ANSWER:
        raise EOFError
    found = json.loads(await _read(line, length))
    if not isinstance(found, list) or len(found) != 2:
        raise EOFError
    return found[0], found[1]


async def _read(line: socket.socket, count: int) -> bytes:
    loop, found = asyncio.get_running_loop(), bytearray()
    while len(found) < count:
        part = await loop.sock_recv(line, min(count - len(found), 2**20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


# In the process


def main(descriptor: int) -> None:
    """Builds the environment that it is told of, and calls its methods until nobody is there any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks decides when it ends
    line = socket.socket(fileno=descriptor)
    questions: list[Any] = []
    there = threading.Condition()
    threading.Thread(target=_listen, args=(line, questions, there), daemon=True).start()

    def asked() -> Any:
        with there:
            there.wait_for(lambda: questions)
            return questions.pop(0)

    def answer(kind: str, found: Any) -> None:
        try:
            content = json.dumps([kind, found], default=float).encode()
        except (TypeError, ValueError, RecursionError) as error:
            content = json.dumps(["EnvironmentFailed", f"returned what is no JSON data: {error}"]).encode()
        with contextlib.suppress(OSError):
            line.sendall(HEAD.pack(len(content)) + content)

    if (first := asked()) is None:
        return
    with asyncio.Runner() as runner:
        environment = _answered(answer, lambda: _built(*first), runner, show=False)
        while environment is not None and (question := asked()) is not None:
            name, *arguments = question
            if name in ("reset", "solve", "restore"):
                arguments[0] = Scenario(**arguments[0])
            _answered(answer, lambda: getattr(environment, name)(*arguments), runner)  # noqa: B023  called at once
        with contextlib.suppress(Exception):
            _result(environment.close(), runner)


def _built(target: dict[str, Any], packages: list[str]) -> Any:
    return validate(Target, target, allow=packages).build()


def _answered(
    answer: Callable[[str, Any], None], work: Callable[[], Any], runner: asyncio.Runner, show: bool = True
) -> Any:
    """Answers with what `work` returns or raises; returns it too."""
    try:
        found = _result(work(), runner)
    except SpecError as error:
        answer("SpecError", [[problem.path, problem.message] for problem in error.problems])
        return None
    except Exception as error:  # noqa: BLE001  whatever an environment raises is data
        ours = isinstance(error, EnvironmentFailed | ResourceError)
        away = isinstance(error, EnvironmentAway) or (not ours and passes(error))
        kind = "ResourceError" if isinstance(error, ResourceError) else "EnvironmentFailed"
        answer("EnvironmentAway" if away else kind, str(error) if ours else f"{type(error).__name__}: {error}")
        return None
    answer("returned", _data(found) if show else None)
    return found


def _result(found: Any, runner: asyncio.Runner) -> Any:
    async def awaited() -> Any:
        return await found

    return runner.run(awaited()) if asyncio.iscoroutine(found) else found


def _data(found: Any) -> Any:
    """As JSON data."""
    if isinstance(found, Step):
        return {name: getattr(found, name) for name in Step.__slots__}
    if isinstance(found, list | tuple) and any(isinstance(one, Scenario) for one in found):
        return [_plain(one) for one in found]
    return found


def _listen(line: socket.socket, questions: list[Any], there: threading.Condition) -> None:
    """Takes questions; where nobody is left to ask any, the process ends, in the middle of a step too."""
    with line.makefile("rb") as file:
        while len(head := file.read(HEAD.size)) == HEAD.size:
            question = json.loads(file.read(*HEAD.unpack(head)))
            with there:
                questions.append(question)
                there.notify()
    with there:
        questions.append(None)
        there.notify()
    time.sleep(CLOSING)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
