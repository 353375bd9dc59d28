"""Tasks in folders, in Harbor's format: the agent works on files, and the tests of the task score them.

Each command of the agent runs in the sandbox on the files that the last one left (`work`); a program as agent
(`agent.command`) works on a folder of this machine. The tests run in another sandbox on a copy of the working folder;
neither they nor the solution are visible to the agent. Success is a reward of 1 or more.

A task whose tests succeed before anything is done fails its episodes with that reason, because it teaches nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import shlex
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from components.aio import stoppable
from components.environments.protocol import Messages, Step, WorkFolder
from components.environments.restorable import RestorableState
from components.environments.tasks.folder import FolderTask, content_digest, read_tasks
from components.environments.tasks.host_folder import HostFolder
from components.environments.tasks.work import Command, WorkSandbox
from components.environments.tools import InvalidAction, call, tool
from components.errors import EnvironmentFailed, SpecError
from components.sandbox.bubblewrap import check
from components.specs.marks import FILES
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LONGEST = 20_000
"""Maximum number of characters of a command or a text."""
_DIFFICULTIES = {"easy": 1, "medium": 2, "hard": 3}
_WRITE = """
import os, sys
path, text = sys.argv[1:]
os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
with open(path, "w") as file:
    file.write(text)
"""
_EDIT = """
import sys
path, old, new = sys.argv[1:]
with open(path, newline="") as file:
    text = file.read()
if not old or text.count(old) != 1:
    sys.exit(f"{path} contains the old text {text.count(old)} times; expected once")
with open(path, "w", newline="") as file:
    file.write(text.replace(old, new))
"""
_passes_untouched: dict[str, bool] = {}
"""True if the tests of a task succeed on the untouched folder, by the digest of both."""


@registered("environment.tasks")
class Tasks(RestorableState):
    """Tasks in folders. Scenario types: `metadata.category` of the tasks. Difficulty: `metadata.difficulty`; 1 easy,
    2 medium, 3 hard.

    Args:
        path: Folder of tasks, or a task: folders with `instruction.md`, `task.toml`, `environment/`, `tests/`.
        heldout: Share of the tasks that is held out, chosen by a hash of their names.
        unsupported: `refuse` or `skip` tasks that need more than the sandbox has.
        offline: Run tasks that ask for a network without one.
        seconds: Time limit of a command, in seconds. Tests have the limit of their task.
        memory_mb, disk_mb: Memory and size of files where the task states none. Files are in memory.
        output: Maximum number of bytes of a command's output that the agent sees.
        system: System prompt.
    """

    saved = ("files", "commands", "failed_commands", "spent", "rewards", "problem")

    def __init__(
        self,
        path: Annotated[str, FILES],
        heldout: Annotated[float, Field(ge=0, lt=1)] = 0.2,
        unsupported: Literal["refuse", "skip"] = "refuse",
        offline: bool = False,
        seconds: Annotated[float, Field(ge=1, le=3600)] = 60.0,
        memory_mb: Annotated[int, Field(ge=64)] = 512,
        disk_mb: Annotated[int, Field(ge=1)] = 64,
        output: Annotated[int, Field(ge=100, le=100_000)] = 4000,
        system: str = "Do the task by working on files. When it is done, answer with a summary.",
    ):
        self.system = system
        self._path = Path(path).expanduser().resolve()
        self._seconds = seconds
        self._limits = {"memory_mb": memory_mb, "disk_mb": disk_mb, "output": output}
        self._tasks = {task.name: task for task in read_tasks(path, offline=offline, skip=unsupported == "skip")}
        ranked = sorted(self._tasks, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        count = max(1, round(heldout * len(ranked))) if heldout and len(ranked) > 1 else 0
        self._scenarios = [
            _scenario(task, "heldout" if name in ranked[:count] else "train") for name, task in self._tasks.items()
        ]
        self._stop = threading.Event()
        self._folder: HostFolder | None = None

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that determine results: the tasks by the content of their files."""
        return {**arguments, "path": content_digest(arguments["path"])}

    def begin(self, scenario: Scenario) -> str:
        check()
        self.close()
        self._task = self._tasks[scenario.id]
        self._sandbox = WorkSandbox(self._task, **self._limits)
        self.files = base64.b64encode(self._task.work).decode()
        self.commands = self.failed_commands = 0
        self.spent = 0.0
        self.rewards: dict[str, float] = {}
        self.problem = ""
        self._refuse_trivial()
        return self._task.instruction.strip()

    async def step(self, action: dict[str, Any]) -> Step:  # type: ignore[override]  # the protocol allows both
        """Run the step in a thread, so that a command does not block other episodes; kill it if cancelled."""
        self._stop = threading.Event()
        return await stoppable(functools.partial(super().step, action), self._stop)

    @tool
    def shell(self, command: Annotated[str, "for bash; programs that it starts end with it"]) -> str:
        """runs a command in the working folder and shows its output"""
        return self._run(["bash", "-c", command]) or "[no output]"

    @tool
    def write(self, path: str, text: str) -> str:
        """writes a file, in place of one that exists"""
        return self._run(["python3", "-c", _WRITE, path, text]) or "written"

    @tool
    def edit(self, path: str, old: Annotated[str, "occurs exactly once"], new: str) -> str:
        """replaces a part of a file"""
        return self._run(["python3", "-c", _EDIT, path, old, new]) or "replaced"

    def on_message(self, text: str) -> Messages:
        """Run the tests, which ends the episode."""
        self.done = True
        files = base64.b64decode(self.files)
        if self._folder is not None:
            files, self.problem = self._folder.packed(self._sandbox.disk_mb)
        if not self.problem:
            self.rewards, self.problem = scored(self._sandbox.test(files, self._stop))
        self.reward = self.rewards.get("reward", 0.0)
        return []

    def outcome(self, answer: str) -> dict[str, Any]:
        reward = self.rewards.get("reward", 0.0)
        return {
            "success": reward >= 1,
            **({"problem": self.problem} if self.problem else {}),
            "reward": reward,
            "progress": min(max(reward, 0.0), 1.0),
            "commands": self.commands,
            "failed_commands": self.failed_commands,
            **({"rewards": self.rewards} if len(self.rewards) > 1 else {}),
        }

    @property
    def workspace(self) -> WorkFolder:
        """Return the working folder as a folder of this machine, which the tests then score."""
        if self._folder is None:
            self._folder = HostFolder(self._task.work)
        limit = self._task.settings["agent.timeout_sec"]
        return WorkFolder(self._folder.path, self._task.workdir, self._task.variables, limit, (self._path,))

    def check_program(self, scenarios: Sequence[Scenario]) -> None:
        """Raise SpecError if a scenario must not have the network, which a program has."""
        for key in ("environment.network_mode", "agent.network_mode"):
            names = [scenario.id for scenario in scenarios if self._tasks[scenario.id].settings[key] == "no-network"]
            if names:
                tasks = f"task {names[0]}" if len(names) == 1 else f"{len(names)} tasks, such as {names[0]}"
                message = (
                    f"{tasks}: task.toml: {key} = no-network, but a program of agent.command has the network, because "
                    "it needs the endpoint; remove the key from tasks that may have it, or set agent=default"
                )
                raise SpecError.at("environment.path", message)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
        self._folder = None

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return calls that write the solution's other files and run its script. Raises SpecError without one."""
        task = self._tasks[scenario.id]
        texts = {name: content.decode(errors="replace") for name, content in task.solution.items()}
        if (script := texts.pop("solve.sh", None)) is None:
            message = (
                f"task {task.name} has no solution/solve.sh, which demonstrations need; add it, or set warmup=none"
            )
            raise SpecError.at("environment.path", message)
        exports = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in task.settings["solution.env"].items()
        )
        if "$0" in script or "BASH_SOURCE" in script:
            texts["solve.sh"], script = script, "bash /solution/solve.sh"
        calls = [("write", {"path": f"/solution/{name}", "text": text}) for name, text in texts.items()]
        calls.append(("shell", {"command": exports + script}))
        messages = [call(name, arguments, number) for number, (name, arguments) in enumerate(calls)]
        return [*messages, {"role": "assistant", "content": "Done."}]

    def check_solutions(self, scenarios: Sequence[Scenario]) -> None:
        """Raise SpecError if a scenario has no solution."""
        for scenario in scenarios:
            self.solve(scenario)

    def _run(self, command: Sequence[str]) -> str:
        """Run a command; return its output, and how it ended unless well."""
        if any(len(word) > LONGEST or "\0" in word for word in command):
            raise InvalidAction(f"a command or text has at most {LONGEST} characters, and no zero byte")
        left = (self._task.settings["agent.timeout_sec"] or math.inf) - self.spent
        if left <= 0:
            raise InvalidAction("the time for the task is used up; answer to end it")
        result = self._sandbox.run(base64.b64decode(self.files), command, min(self._seconds, left), self._stop)
        self.spent += result.seconds
        self.commands += 1
        self.failed_commands += result.code != 0
        if result.files is not None:
            self.files = base64.b64encode(result.files).decode()
        note = f"[the command was ended: {result.ended}]" if result.ended else f"[exit code {result.code}]"
        return "\n".join(filter(None, [result.output.rstrip("\n"), note if result.code else ""]))

    def _refuse_trivial(self) -> None:
        """Raise EnvironmentFailed if the tests of the task succeed on the untouched folder."""
        key = hashlib.sha256(self._task.work + self._task.tests).hexdigest()
        if key not in _passes_untouched:
            rewards, _ = scored(self._sandbox.test(self._task.work))
            _passes_untouched[key] = rewards.get("reward", 0.0) >= 1
        if _passes_untouched[key]:
            raise EnvironmentFailed(
                f"task {self._task.name}: its tests succeed before anything is done; correct or remove it"
            )


def scored(tests: Command) -> tuple[dict[str, float], str]:
    """Return the rewards that tests wrote, of which `reward` is the main one, and why there are none. The only reward
    of a file is the main one, whatever its name."""
    if tests.ended:
        return {}, f"the tests were ended: {tests.ended}"
    if tests.reward is None:
        shown = tests.output.strip()[-300:]
        return {}, f"the tests wrote no reward to /logs/verifier (exit code {tests.code}): {shown}"
    name, text = tests.reward
    try:
        data = json.loads(text) if name.endswith(".json") else {"reward": float(text)}
        rewards = {str(key): float(value) for key, value in data.items() if isinstance(value, int | float)}
        if len(rewards) == 1:
            rewards = {"reward": next(iter(rewards.values()))}
        if len(rewards) < min(len(data), 2) or "reward" not in rewards or not all(map(math.isfinite, rewards.values())):
            raise ValueError("expected finite numbers by name, with one named reward")
    except (ValueError, AttributeError, RecursionError, OverflowError) as error:
        return {}, f"the tests wrote {text[:100]!r} to {name}: {error}"
    return rewards, ""


def _scenario(task: FolderTask, split: str) -> Scenario:
    metadata = task.settings["metadata"]
    difficulty = _DIFFICULTIES.get(str(metadata.get("difficulty")), 0)
    input = {"instruction": task.instruction, "task": task.name}
    return Scenario(task.name, input, split, str(metadata.get("category") or "task"), difficulty)
