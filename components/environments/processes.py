"""Environments in subprocesses, for environments that are CPU-bound in Python, leak memory, or may crash.

    environment:
      _target_: components.environments.processes.SubprocessEnvironment
      environment:
        _target_: my_package.worlds.Heavy
        size: 40

Each instance has one subprocess. Its computation blocks neither other episodes nor the engine. When a subprocess dies,
its episode fails and a new subprocess replaces it. A step that exceeds `collect.step_timeout` kills the subprocess.
Scenarios, tools, seeds and results are identical to those of the wrapped environment.

Subprocess and collector exchange JSON (`components.json_process`). Results are validated like those of any environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any

from pydantic import Field

from components.environments.protocol import Messages, Step
from components.errors import EnvironmentFailed, EnvironmentUnavailable, Problem, ResourceError, SpecError
from components.exceptions import RemoteTraceback, described, passes
from components.json_process import JsonProcess, JsonProgram, ProcessExited, RequestFailed
from components.specs import Target, validate
from components.specs.registered import registered
from components.trajectories.schema import Scenario

START = 120.0
"""Timeout for building the environment in the subprocess, in seconds."""
EXIT = 5.0
"""Time that the subprocess has to close its environment and exit, in seconds."""
OPTIONAL = ("solve", "save", "restore")
"""Optional methods of an environment."""
_PROGRAM = JsonProgram(f"{__name__}:WrappedEnvironment", show_stderr=True)


@registered("environment.in_processes")
class SubprocessEnvironment:
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
        self._process: JsonProcess | None = None
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
        process, self._process = self._process, None
        if process is None:
            return
        if self._waiting:  # an abandoned call still runs there
            await asyncio.to_thread(process.kill)
        await asyncio.to_thread(process.close, EXIT)

    async def _solve(self, scenario: Scenario) -> Any:
        return await self._ask("solve", _plain(scenario))

    async def _save(self) -> Any:
        return await self._ask("save")

    async def _restore(self, scenario: Scenario, state: Any) -> None:
        await self._ask("restore", _plain(scenario), state)

    async def _ask(self, name: str, *arguments: Any) -> Any:
        """Return the result of a method of the wrapped environment.

        Raises EnvironmentFailed if the method raises or the subprocess dies; SpecError, ResourceError and
        EnvironmentUnavailable keep their class.
        """
        if self._waiting:
            raise EnvironmentFailed(f"{name}: the environment is busy: its subprocess still runs an abandoned call")
        self._waiting = True
        process = self._process or await self._start()
        answer = await self._answer(name, process.request({"method": name, "arguments": arguments}))
        self._waiting = False
        return _result(answer)

    async def _start(self) -> JsonProcess:
        process = self._process = JsonProcess(_PROGRAM)
        name, data = self._target.target, self._target.model_dump()
        request = process.request({"method": "build", "arguments": [data, sorted(_packages(data))]})
        try:
            async with asyncio.timeout(START):
                _result(await self._answer(name, request))
        except TimeoutError:
            message = f"building the environment in its subprocess timed out after {START:g} s"
            raise EnvironmentFailed(f"{name}: {message}") from None
        return process

    async def _answer(self, name: str, response: Future[Any]) -> Any:
        try:
            return await asyncio.wrap_future(response)
        except ProcessExited as error:
            raise EnvironmentFailed(f"{name}: its subprocess died ({error})") from None
        except RequestFailed as error:
            return ["EnvironmentFailed", error.text, ""]


def _result(answer: Any) -> Any:
    """Return the result in a response of the subprocess, or raise the exception in it."""
    match answer:
        case ["returned", result]:
            return result
        case ["SpecError", problems]:
            raise SpecError([Problem(str(path), str(message)) for path, message in problems])
        case ["ResourceError", message, _]:
            raise ResourceError(str(message))
        case ["EnvironmentUnavailable" | "EnvironmentFailed" as kind, message, text]:
            failed = EnvironmentUnavailable if kind == "EnvironmentUnavailable" else EnvironmentFailed
            raise failed(str(message)) from (RemoteTraceback(text) if text else None)
    raise EnvironmentFailed(f"the subprocess returned the invalid response {answer!r:.200}")


def _packages(data: Any) -> set[str]:
    """Return the top-level packages of all targets in a configuration."""
    if isinstance(data, dict):
        packages = {str(data["_target_"]).partition(".")[0]} if "_target_" in data else set()
        return packages.union(*map(_packages, data.values()))
    return set().union(*map(_packages, data)) if isinstance(data, list) else set()


def _plain(scenario: Scenario) -> dict[str, Any]:
    return {name: getattr(scenario, name) for name in Scenario.__slots__}


# Code that runs in the subprocess


class WrappedEnvironment:
    """The environment in its subprocess: the first call builds it, further ones call its methods."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._environment: Any = None

    def __call__(self, method: str, arguments: list[Any]) -> list[Any]:
        """Return `["returned", result]`, or the kind, the description and the traceback of an exception."""
        try:
            if method == "build":
                target, packages = arguments
                self._environment = validate(Target, target, allow=packages).build()
                return ["returned", None]
            if method in ("reset", "solve", "restore"):
                arguments[0] = Scenario(**arguments[0])
            return ["returned", _data(self._resolve(getattr(self._environment, method)(*arguments)))]
        except SpecError as error:
            return ["SpecError", [[problem.path, problem.message] for problem in error.problems]]
        except Exception as error:  # noqa: BLE001  exceptions of an environment are data
            classified = isinstance(error, EnvironmentFailed | ResourceError)
            away = isinstance(error, EnvironmentUnavailable) or (not classified and passes(error))
            kind = "ResourceError" if isinstance(error, ResourceError) else "EnvironmentFailed"
            return [
                "EnvironmentUnavailable" if away else kind,
                str(error) if classified else described(error),
                "".join(traceback.format_exception(error)),
            ]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._resolve(self._environment.close())
        self._runner.close()

    def _resolve(self, value: Any) -> Any:
        async def resolve() -> Any:
            return await value

        return self._runner.run(resolve()) if asyncio.iscoroutine(value) else value


def _data(result: Any) -> Any:
    """Convert steps and scenarios to JSON data."""
    if isinstance(result, Step):
        return {name: getattr(result, name) for name in Step.__slots__}
    if isinstance(result, list | tuple) and any(isinstance(item, Scenario) for item in result):
        return [_plain(item) for item in result]
    return result
