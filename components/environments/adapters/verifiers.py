"""Environments of the package verifiers (0.4): the tasks, tools and rewards of a taskset.

The package runs the episode itself: it gives the task to an agent program, serves the tools of the task, and scores the
result. Only the model runs here: each model call is an observation, its reply is the action. Everything else that a
taskset or an environment of the package does (tools, further turns, several programs) therefore works unchanged.

The package needs other versions of libraries than Espalier. It therefore runs in a subprocess, with the interpreter
`python`; all instances of one event loop share the subprocess. Episodes with several concurrent conversations are not
supported and fail with that reason.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import json
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from components.environments.protocol import Messages, Step
from components.environments.seeded import Count
from components.errors import EnvironmentFailed, ResourceError, SpecError
from components.json_process import JsonProcess, JsonProgram, ProcessExited, RequestFailed
from components.specs.marks import CODE, ENV_VARIABLE, PROGRAM
from components.specs.registered import registered
from components.trajectories.schema import Scenario

WORKER = Path(__file__).with_name("verifiers_worker.py")
LONGEST_ERROR = 2000
"""Maximum length of an error message of the subprocess in characters."""
HELD_OUT = 5
"""One of this many tasks is held out if `heldout_taskset` is not set."""


@registered("environment.verifiers")
class Verifiers:
    """A taskset of the package verifiers.

    Scenario type: the `type` of a task, otherwise the id of the taskset. Difficulty: that of the task (1 to 5),
    otherwise unknown.

    Args:
        taskset: Id or module of the taskset, as for `vf-eval`, or a mapping with `id` and settings.
        env: Settings of the environment, such as agents and limits; with `id` if it differs from the taskset's.
        folders: Folders with your own taskset modules.
        tasks: Maximum number of tasks that are read.
        heldout_taskset: Settings of the taskset for the held-out split, such as {split: test}; null holds out one task
            in five.
        train, heldout: Maximum number of scenarios of the split; null takes all.
        success: Minimum reward of a successful episode.
        python: Interpreter that has the package; null takes the current one.
        variables: Environment variables passed to the subprocess, besides PATH, HOME and the like.
        start_timeout: Timeout for reading the tasks, in seconds.
        timeout: Timeout between two model calls, in seconds.
    """

    def __init__(
        self,
        taskset: Annotated[str | Mapping[str, Any], CODE],
        env: Annotated[Mapping[str, Any] | None, CODE] = None,
        folders: Annotated[Sequence[str], CODE] = (),
        tasks: Annotated[int, Field(ge=1)] = 10_000,
        heldout_taskset: Annotated[Mapping[str, Any] | None, CODE] = None,
        train: Count | None = None,
        heldout: Count | None = None,
        success: float = 1.0,
        python: Annotated[str | None, PROGRAM] = None,
        variables: Annotated[Sequence[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]], ENV_VARIABLE] = (),
        start_timeout: Annotated[float, Field(gt=0)] = 300.0,
        timeout: Annotated[float, Field(gt=0)] = 300.0,
    ):
        settings = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
        if not settings.get("id"):
            raise SpecError.at("environment.taskset", "has no id; expected the id of a taskset")
        self.name = str(settings["id"])
        self.success, self.timeout = success, timeout
        self.most = {"train": train, "heldout": heldout}
        splits = {"train": settings, **({"heldout": settings | dict(heldout_taskset)} if heldout_taskset else {})}
        self._configs = {
            split: json.dumps({"config": {**(env or {}), "taskset": split_settings}, "most": tasks}, sort_keys=True)
            for split, split_settings in splits.items()
        }
        self._launch = LaunchOptions(python or sys.executable, tuple(folders), tuple(variables), start_timeout)
        self._worker: VerifiersWorker | None = None
        self._over = True
        self._offered: list[dict[str, Any]] | None = None

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for stage keys: folders by their content, without the interpreter and the timeouts."""
        excluded = ("python", "timeout", "start_timeout", "folders")
        relevant = {name: value for name, value in arguments.items() if name not in excluded}
        return relevant | {"folders": [folder_digests(folder) for folder in arguments.get("folders") or ()]}

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """Return the scenarios of a split; tasks are read once per process."""
        if split not in ("train", "heldout"):
            return []
        by_split = {name: read(config, self._launch) for name, config in self._configs.items()}
        tasks = list(enumerate(by_split.get(split, by_split["train"])))
        if len(by_split) == 1:
            tasks = [entry for entry in tasks if (entry[0] % HELD_OUT == HELD_OUT - 1) == (split == "heldout")]
        return [self._scenario(index, task, split) for index, task in tasks[: self.most[split]]]

    async def tools(self) -> list[dict[str, Any]]:
        """Return the tools that the package offers with the first task."""
        if self._offered is None:
            await self.reset(self.scenarios("train")[0])
            self._stop()
            self._offered = self._requested
        return self._offered

    async def reset(self, scenario: Scenario) -> Messages:
        self._stop()
        config = self._configs.get(scenario.split, self._configs["train"])
        self._worker = await get_worker(config, self._launch)
        self._episode, self._over = str(next(_numbers)), False
        response = await self._worker.begin(self._episode, scenario.input["task"], self.timeout)
        if "ask" not in response:
            raise EnvironmentFailed(f"verifiers: {self.name} made no model call: {_reason(response['ended'])}")
        self._requested = response["ask"]["tools"]
        if self._offered is not None and self._requested != self._offered:
            self._stop()
            raise EnvironmentFailed(f"verifiers: {self.name} offers different tools for this task than for the first")
        self._messages: Messages = [_plain(message) for message in response["ask"]["messages"]]
        return list(self._messages)

    async def step(self, action: dict[str, Any]) -> Step:
        if self._worker is None or self._over:
            raise EnvironmentFailed("verifiers: step before reset")
        response = await self._worker.answer(self._episode, action, self.timeout)
        if "ended" in response:
            self._over = True
            return self._final_step(response["ended"])
        messages = [_plain(message) for message in response["ask"]["messages"]]
        length = len(self._messages) + 1
        if messages[: len(self._messages)] != self._messages or len(messages) < length:
            self._stop()
            raise EnvironmentFailed(
                f"verifiers: {self.name} has several conversations in one episode, or rewrites its history; this is "
                "not supported"
            )
        self._messages = messages
        return Step(messages[length:], info={"success": False})

    async def close(self) -> None:
        self._stop()

    def _scenario(self, index: int, task: Mapping[str, Any], split: str) -> Scenario:
        name = f"{self.name}-{split if len(self._configs) == 2 else index}-{task['key'][:12]}"
        input = {"task": index, "name": task["name"], "key": task["key"]}
        return Scenario(name, input, split, task["type"] or self.name, task["difficulty"])

    def _final_step(self, result: Mapping[str, Any]) -> Step:
        if not result.get("ok"):
            raise EnvironmentFailed(f"verifiers: {self.name} failed: {_reason(result)}")
        reward = float(result["reward"])
        outcome = {
            "success": reward >= self.success,
            "progress": min(1.0, max(0.0, reward / self.success)) if self.success > 0 else 0.0,
            "rewards": result["rewards"],
            "metrics": result["metrics"],
        }
        return Step([], reward, done=True, info=outcome)

    def _stop(self) -> None:
        """Abandon the current episode."""
        if self._worker is not None and not self._over:
            self._worker.stop(self._episode)
        self._over = True


@dataclass(frozen=True)
class LaunchOptions:
    """Options for starting the subprocess of the package."""

    python: str
    folders: tuple[str, ...]
    variables: tuple[str, ...]
    start_timeout: float

    def program(self) -> JsonProgram:
        """Return the program of the subprocess. Raises ResourceError if an environment variable is not set."""
        python = str(Path(self.python).expanduser())
        return JsonProgram(f"{WORKER}:EpisodeWorker", python=(python,), variables=self.environment(), new_session=True)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the subprocess. Raises ResourceError if a variable is not set."""
        if missing := [name for name in self.variables if name not in os.environ]:
            raise ResourceError(f"environment.variables: the environment variable {missing[0]} is not set")
        names = ("HOME", "LANG", "PATH", "TMPDIR", "USER", *self.variables)
        variables = {name: os.environ[name] for name in names if name in os.environ}
        folders = [str(Path(folder).expanduser().absolute()) for folder in self.folders]
        return variables | {"PYTHONPATH": os.pathsep.join(folders)}


class VerifiersWorker:
    """The subprocess that runs all episodes of one event loop, until the loop ends."""

    def __init__(self, launch: LaunchOptions) -> None:
        self._process = JsonProcess(launch.program())
        self._end_with_loop = asyncio.create_task(self._kill_at_end())

    async def open(self, config: str, timeout: float) -> None:
        """Read the tasks. Raises EnvironmentFailed on timeout, SpecError if loading fails."""
        try:
            await self._ask({"action": "open", "play": True, **json.loads(config)}, timeout)
        except RequestFailed as error:
            raise SpecError.at("environment.taskset", str(error)[:LONGEST_ERROR]) from None
        except TimeoutError:
            text = f"verifiers: reading tasks timed out after {timeout:g} s (environment.start_timeout)"
            raise EnvironmentFailed(text) from None

    async def begin(self, episode: str, task: int, timeout: float) -> dict[str, Any]:
        """Start an episode; return its first model call, or its end."""
        return await self._event({"action": "play", "episode": episode, "task": task}, timeout)

    async def answer(self, episode: str, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send the model's reply; return the next model call, or the end of the episode."""
        return await self._event({"action": "answer", "episode": episode, "message": message}, timeout)

    def stop(self, episode: str) -> None:
        """Cancel an episode."""
        self._process.request({"action": "stop", "episode": episode})

    async def kill(self) -> None:
        """Kill the subprocess without blocking the event loop."""
        await asyncio.to_thread(self._process.kill)
        self._end_with_loop.cancel()

    @property
    def alive(self) -> bool:
        return self._process.alive

    async def _event(self, arguments: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        try:
            return dict(await self._ask(arguments, timeout))
        except TimeoutError:
            raise EnvironmentFailed(f"verifiers: timed out after {timeout:g} s (environment.timeout)") from None
        except RequestFailed as error:
            raise EnvironmentFailed(f"verifiers: {error}") from None

    async def _ask(self, arguments: Mapping[str, Any], timeout: float) -> Any:
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.wrap_future(self._process.request(arguments))
        except ProcessExited as error:
            raise EnvironmentFailed(f"verifiers: the subprocess exited ({error})") from None

    async def _kill_at_end(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._process.kill()


_numbers = itertools.count()
_workers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, asyncio.Task[VerifiersWorker]]] = (
    weakref.WeakKeyDictionary()
)


async def get_worker(config: str, launch: LaunchOptions) -> VerifiersWorker:
    """Return the worker for a configuration on this event loop; it ends with the loop."""
    workers = _workers.setdefault(asyncio.get_running_loop(), {})

    async def start() -> VerifiersWorker:
        worker = VerifiersWorker(launch)
        try:
            await worker.open(config, launch.start_timeout)
        except BaseException:
            await worker.kill()
            raise
        return worker

    task = workers.get((config, launch))
    if task is None or (task.done() and (task.cancelled() or task.exception() or not task.result().alive)):
        task = workers[config, launch] = asyncio.create_task(start())
    return await asyncio.shield(task)


@functools.cache
def read(config: str, launch: LaunchOptions) -> list[dict[str, Any]]:
    """Return the tasks of a configuration, cached per process.

    Raises SpecError if the taskset cannot be loaded, ResourceError if the interpreter or the package is missing.
    """
    arguments = {"action": "open", "play": False, **json.loads(config)}
    try:
        return list(launch.program().call(arguments, launch.start_timeout))
    except TimeoutError:
        text = f"reading tasks timed out after {launch.start_timeout:g} s; raise it, or lower environment.tasks"
        raise ResourceError(f"environment.start_timeout: {text}") from None
    except OSError as error:
        raise ResourceError(f"environment.python: {launch.python}: {error.strerror}; expected an interpreter") from None
    except ProcessExited as error:
        text = f"the subprocess exited without returning tasks ({error})"
        raise ResourceError(f"environment.taskset: {text}") from None
    except RequestFailed as error:
        if "No module named 'verifiers" in error.text:
            raise ResourceError(
                f"environment.python: {launch.python} has no package verifiers; create an environment that has it "
                "(python -m venv there && there/bin/pip install 'verifiers>=0.4,<0.5'), and set its interpreter: "
                "environment.python=there/bin/python"
            ) from None
        raise SpecError.at("environment.taskset", str(error)[:LONGEST_ERROR]) from None


def folder_digests(folder: str) -> list[list[str]]:
    """Return the name and digest of each module in a folder, for stage keys."""
    root = Path(folder).expanduser()
    files = sorted(path for path in root.rglob("*.py") if path.is_file())
    return [[str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with text content; other parts are replaced by their type."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
    calls = {name: message[name] for name in ("tool_calls", "tool_call_id") if message.get(name)}
    return {"role": message["role"], "content": content or "", **calls}


def _reason(result: Mapping[str, Any]) -> str:
    return "; ".join(result.get("errors") or []) or f"it ended with {result.get('stop') or 'not ok'}"
