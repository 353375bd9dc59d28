"""Environments of the package verifiers (0.4): a taskset's tasks, tools and rewards, played turn by turn.

The package runs an episode itself: it gives the task to an agent's program, serves the task's tools, and scores what
came of it. Only the model is here: each call for it is an observation, its answer the action. So whatever a taskset or
an environment of the package does between two calls (tools, further turns, several programs) needs no translation.

It wants other versions of libraries than Espalier: it runs in a process of its own, in the interpreter `python`, and
that process is shared by all instances of one event loop. Episodes that lead several conversations at once cannot be
played so; they fail, with that reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field

from components.environments.protocol import Messages, Step
from components.environments.scenario_counts import Count
from components.errors import EnvironmentFailed, Problem, ResourceError, SpecError
from components.specs.registered import registered
from components.trajectories.schema import Scenario

WORKER = Path(__file__).with_name("verifiers_worker.py")
MAX_LINE = 2**26
"""Bytes of one message of the worker."""
SHOWN = 1000
"""Characters of a worker's last words in an error."""
HELD_OUT = 5
"""One in so many tasks, where no taskset for them is given."""


@registered("environment.verifiers")
class Verifiers:
    """taskset: its id (or module), as `vf-eval` takes it, or a mapping with `id` and its settings. env: the
    environment's own settings, `id` among them where it is not the taskset's: agents, limits. folders: of modules of
    your own, where tasksets are looked for too. tasks: most that are read. heldout_taskset: settings of the taskset for
    the held-out split, such as {split: test}; null: one task in five. train, heldout: most scenarios of the two splits;
    null: all. success: the reward from which an episode is one. python: an interpreter that has the package; null: this
    one. variables: environment variables that its process is given besides PATH, HOME and the like. start_timeout:
    seconds in which it has to have read the tasks. timeout: seconds between two calls for the model.

    Scenario type: the taskset's id, or what a task says as `type`. Difficulty: what a task says (1 to 5), else unknown.
    """

    def __init__(
        self,
        taskset: str | Mapping[str, Any],
        env: Mapping[str, Any] | None = None,
        folders: Sequence[str] = (),
        tasks: Annotated[int, Field(ge=1)] = 10_000,
        heldout_taskset: Mapping[str, Any] | None = None,
        train: Count | None = None,
        heldout: Count | None = None,
        success: float = 1.0,
        python: str | None = None,
        variables: Sequence[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = (),
        start_timeout: Annotated[float, Field(gt=0)] = 300.0,
        timeout: Annotated[float, Field(gt=0)] = 300.0,
    ):
        given = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
        if not given.get("id"):
            raise SpecError([Problem("environment.taskset", "has no id; expected that of a taskset")])
        self.name = str(given["id"])
        self.success, self.timeout = success, timeout
        self.most = {"train": train, "heldout": heldout}
        splits = {"train": given, **({"heldout": given | dict(heldout_taskset)} if heldout_taskset else {})}
        self._configs = {
            split: json.dumps({"config": {**(env or {}), "taskset": one}, "most": tasks}, sort_keys=True)
            for split, one in splits.items()
        }
        self._how = How(python or sys.executable, tuple(folders), tuple(variables), start_timeout)
        self._worker: Worker | None = None
        self._over = True
        self._offered: list[dict[str, Any]] | None = None

    @staticmethod
    def key_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
        """Modules of your own count by their content; which interpreter plays, and our patience, do not."""
        own = ("python", "timeout", "start_timeout", "folders")
        kept = {name: value for name, value in given.items() if name not in own}
        return kept | {"folders": [content_of(one) for one in given.get("folders") or ()]}

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """Reads the tasks, once in a process."""
        if split not in ("train", "heldout"):
            return []
        found = {name: read(config, self._how) for name, config in self._configs.items()}
        tasks = list(enumerate(found.get(split, found["train"])))
        if len(found) == 1:
            tasks = [one for one in tasks if (one[0] % HELD_OUT == HELD_OUT - 1) == (split == "heldout")]
        return [self._scenario(place, one, split) for place, one in tasks[: self.most[split]]]

    async def tools(self) -> list[dict[str, Any]]:
        """Those of the first task: what the package offers the model with it."""
        if self._offered is None:
            await self.reset(self.scenarios("train")[0])
            self._stop()
            self._offered = self._asked
        return self._offered

    async def reset(self, scenario: Scenario) -> Messages:
        self._stop()
        config = self._configs.get(scenario.split, self._configs["train"])
        self._worker = await worker_of(config, self._how)
        self._episode, self._over = str(next(_numbers)), False
        said = await self._worker.begin(self._episode, scenario.input["task"], self.timeout)
        if "ask" not in said:
            raise EnvironmentFailed(f"verifiers: {self.name} asked no model: {_reason(said['ended'])}")
        self._asked = said["ask"]["tools"]
        if self._offered is not None and self._asked != self._offered:
            self._stop()
            raise EnvironmentFailed(f"verifiers: {self.name} offers other tools with this task than with the first one")
        self._seen: Messages = [_plain(one) for one in said["ask"]["messages"]]
        return list(self._seen)

    async def step(self, action: dict[str, Any]) -> Step:
        if self._worker is None or self._over:
            raise EnvironmentFailed("verifiers: step before reset")
        said = await self._worker.answer(self._episode, action, self.timeout)
        if "ended" in said:
            self._over = True
            return self._ended(said["ended"])
        messages = [_plain(one) for one in said["ask"]["messages"]]
        so_far = len(self._seen) + 1
        if messages[: len(self._seen)] != self._seen or len(messages) < so_far:
            self._stop()
            raise EnvironmentFailed(
                f"verifiers: {self.name} leads several conversations in one episode, or rewrites one; that cannot be "
                "played turn by turn"
            )
        self._seen = messages
        return Step(messages[so_far:], info={"success": False})

    async def close(self) -> None:
        self._stop()

    def _scenario(self, place: int, one: Mapping[str, Any], split: str) -> Scenario:
        name = f"{self.name}-{split if len(self._configs) == 2 else place}-{one['key'][:12]}"
        given = {"task": place, "name": one["name"], "key": one["key"]}
        return Scenario(name, given, split, one["type"] or self.name, one["difficulty"])

    def _ended(self, found: Mapping[str, Any]) -> Step:
        if not found.get("ok"):
            raise EnvironmentFailed(f"verifiers: {self.name} failed: {_reason(found)}")
        reward = float(found["reward"])
        outcome = {
            "success": reward >= self.success,
            "progress": min(1.0, max(0.0, reward / self.success)) if self.success > 0 else 0.0,
            "rewards": found["rewards"],
            "metrics": found["metrics"],
        }
        return Step([], reward, done=True, info=outcome)

    def _stop(self) -> None:
        """Gives up the episode under way."""
        if self._worker is not None and not self._over:
            self._worker.stop(self._episode)
        self._over = True


@dataclass(frozen=True)
class How:
    """How the package's process is started."""

    python: str
    folders: tuple[str, ...]
    variables: tuple[str, ...]
    start_timeout: float

    def command(self) -> list[str]:
        return [str(Path(self.python).expanduser()), "-P", str(WORKER)]

    def environment(self) -> dict[str, str]:
        """Raises ResourceError where a variable is not set."""
        if missing := [name for name in self.variables if name not in os.environ]:
            raise ResourceError(f"environment.variables: the environment variable {missing[0]} is not set")
        kept = ("HOME", "LANG", "PATH", "TMPDIR", "USER", *self.variables)
        found = {name: os.environ[name] for name in kept if name in os.environ}
        return found | {"PYTHONPATH": os.pathsep.join(str(Path(one).expanduser().absolute()) for one in self.folders)}


class Worker:
    """The process that plays, for all episodes of one event loop."""

    def __init__(self) -> None:
        self.process: Any = None
        self.waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.opened: asyncio.Future[dict[str, Any]] | None = None
        self.reading: asyncio.Task[None] | None = None
        self.errors: IO[bytes] | None = None

    async def open(self, config: str, how: How) -> None:
        self.opened = asyncio.get_running_loop().create_future()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        self.process = await asyncio.create_subprocess_exec(
            *how.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=how.environment(),
            limit=MAX_LINE,
            start_new_session=True,
        )
        self.reading = asyncio.create_task(self._read())
        self._send(do="open", play=True, **json.loads(config))
        try:
            async with asyncio.timeout(how.start_timeout):
                said = await asyncio.shield(self.opened)
        except TimeoutError:
            self.kill()
            text = f"verifiers: no tasks within {how.start_timeout:g} s (environment.start_timeout)"
            raise EnvironmentFailed(text) from None
        if "failed" in said:
            self.kill()
            raise SpecError([Problem("environment.taskset", said["failed"])])

    async def begin(self, episode: str, task: int, timeout: float) -> dict[str, Any]:
        return await self._ask(episode, timeout, do="play", task=task)

    async def answer(self, episode: str, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        return await self._ask(episode, timeout, do="answer", message=message)

    def stop(self, episode: str) -> None:
        self.waiting.pop(episode, None)
        with contextlib.suppress(EnvironmentFailed):
            self._send(do="stop", episode=episode)

    def kill(self) -> None:
        """With all that it started."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def _ask(self, episode: str, timeout: float, **said: Any) -> dict[str, Any]:
        future = self.waiting[episode] = asyncio.get_running_loop().create_future()
        self._send(episode=episode, **said)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise EnvironmentFailed(f"verifiers: nothing came within {timeout:g} s (environment.timeout)") from None
        finally:
            self.waiting.pop(episode, None)

    def _send(self, **said: Any) -> None:
        if not self.alive:
            raise EnvironmentFailed(f"verifiers: its process has ended{self._last_words()}")
        self.process.stdin.write((json.dumps(said) + "\n").encode("utf-8", "replace"))

    async def _read(self) -> None:
        """Hands each message to whoever waits for it; tells all when there are no more. It ends with its loop, and the
        process with it."""
        try:
            with contextlib.suppress(ValueError):  # a line that is too long ends it
                while line := await self.process.stdout.readline():
                    said = json.loads(line)
                    future = self.waiting.get(said["episode"]) if "episode" in said else self.opened
                    if future is not None and not future.done():
                        future.set_result(said)
        finally:
            self.kill()
            await self.process.wait()
        error = EnvironmentFailed(f"verifiers: its process has ended{self._last_words()}")
        for future in [*self.waiting.values(), *([self.opened] if self.opened else [])]:
            if not future.done():
                future.set_exception(error)

    def _last_words(self) -> str:
        if self.errors is None:
            return ""
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - SHOWN))
        said = self.errors.read().decode(errors="replace").strip()
        return f"; it said: {said}" if said else ""


_numbers = itertools.count()
_workers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, asyncio.Task[Worker]]] = (
    weakref.WeakKeyDictionary()
)


async def worker_of(config: str, how: How) -> Worker:
    """The worker for a configuration on this event loop; it ends with the loop."""
    workers = _workers.setdefault(asyncio.get_running_loop(), {})

    async def start() -> Worker:
        worker = Worker()
        await worker.open(config, how)
        return worker

    task = workers.get((config, how))
    if task is None or (task.done() and (task.cancelled() or task.exception() or not task.result().alive)):
        task = workers[config, how] = asyncio.create_task(start())
    return await asyncio.shield(task)


@functools.cache
def read(config: str, how: How) -> list[dict[str, Any]]:
    """The tasks of a configuration, read once in this process. Raises SpecError for a taskset that there is not,
    ResourceError where the interpreter or the package is missing."""
    asked = json.dumps({"do": "open", "play": False, **json.loads(config)}) + "\n"
    try:
        found = subprocess.run(
            how.command(),
            input=asked.encode(),
            capture_output=True,
            env=how.environment(),
            timeout=how.start_timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"no tasks within {how.start_timeout:g} s; raise it, or read fewer (environment.tasks)"
        raise ResourceError(f"environment.start_timeout: {text}") from None
    except OSError as error:
        raise ResourceError(f"environment.python: {how.python}: {error.strerror}; expected an interpreter") from None
    said = json.loads(found.stdout.splitlines()[0]) if found.stdout.strip() else {}
    failed = said.get("failed", "")
    if "No module named 'verifiers" in failed:
        raise ResourceError(
            f"environment.python: {how.python} has no package verifiers; make an environment that has it "
            "(python -m venv there && there/bin/pip install 'verifiers>=0.4,<0.5'), and name its interpreter: "
            "environment.python=there/bin/python"
        )
    if failed:
        raise SpecError([Problem("environment.taskset", failed)])
    if "tasks" not in said:
        words = found.stderr.decode(errors="replace").strip()[-SHOWN:]
        raise ResourceError(f"environment.taskset: its process ended without a word of tasks: {words}")
    return list(said["tasks"])


def content_of(folder: str) -> list[list[str]]:
    """What stands for a folder of modules in a stage's key: each by name and digest."""
    root = Path(folder).expanduser()
    files = sorted(path for path in root.rglob("*.py") if path.is_file())
    return [[str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its content as text: parts of other kinds are named."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(one.get("text", f"[{one.get('type')}]")) for one in content)
    kept = {name: message[name] for name in ("tool_calls", "tool_call_id") if message.get(name)}
    return {"role": message["role"], "content": content or "", **kept}


def _reason(found: Mapping[str, Any]) -> str:
    return "; ".join(found.get("errors") or []) or f"it ended as {found.get('stop') or 'not ok'}"
