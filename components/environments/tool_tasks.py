"""Files of tasks for tools, and their generation by a language model.

The file is a JSON list. Only `task` is needed:

    {"task": "Who ordered the lamp?", "difficulty": 2, "type": "lookup", "split": "train", "id": "lamp",
     "criteria": "names Ann Lee",                     criterion for a judge
     "solution": [{"tool": "find", "arguments": {"item": "lamp"}}, {"say": "Ann Lee did."}],
     "data": {...}}                                   input of your own success function

If no task states its split, every fifth task is held out. The file is content-addressed: stages are reused as long as
its tasks stay the same, regardless of its path.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, ValidationError

from components.environments.language_model import ServedModel
from components.environments.protocol import Messages
from components.errors import EnvironmentFailed, ResourceError, SpecError
from components.specs import Spec
from components.specs.wording import first_problem
from components.trajectories.schema import Scenario

MAX_FILE = 2**28
"""Maximum file size, in bytes."""
HELD_OUT = 5
"""One of this many tasks is held out if the file states no splits."""
DIFFICULTIES = {
    1: "one call of one tool",
    2: "two calls, or one whose arguments need some thought",
    3: "three or four calls that build on each other",
    4: "five or more calls, or choosing among several ways",
    5: "planning ahead, combining many results, noticing what does not fit",
}
AT_ONCE = 8
"""Maximum number of tasks in one request to the author."""
ROUNDS = 6
"""Maximum number of requests per difficulty, for each full batch of tasks."""


class Task(Spec):
    """One entry of the file."""

    task: str = Field(min_length=1, max_length=20_000)
    difficulty: int = Field(0, ge=0, le=5)
    """1 to 5; 0 means unknown."""
    type: str = Field("", max_length=100)
    split: Literal["train", "heldout"] | None = None
    id: str | None = Field(None, min_length=1, max_length=200)
    criteria: str = Field("", max_length=20_000)
    """Requirements of a correct answer."""
    solution: list[dict[str, Any]] | None = None
    """Calls, each {"tool", "arguments"}, and messages, each {"say"}."""
    data: Any = None

    def scenario(self, number: int) -> Scenario:
        """Return the scenario of this task. number: index in the file."""
        name = self.id or f"task-{hashlib.sha256(self.task.encode()).hexdigest()[:12]}"
        split = self.split or ("heldout" if number % HELD_OUT == HELD_OUT - 1 else "train")
        input: dict[str, Any] = {"task": self.task}
        if self.criteria:
            input["criteria"] = self.criteria
        if self.solution is not None:
            input["solution"] = self.solution
        if self.data is not None:
            input["data"] = self.data
        return Scenario(name, input, split, self.type or "task", self.difficulty)


class TaskAuthor(Protocol):
    """A model that writes tasks."""

    @property
    def model(self) -> str:
        """Return its name, for messages."""
        ...

    async def ask(self, messages: Messages, *, seed: int, max_tokens: int, temperature: float = 0.0) -> str:
        """Return the reply to a conversation."""
        ...


class Author(ServedModel):
    """A model that writes tasks, on a server."""

    role = "author"
    key_path = "the author"


def read_tasks(path: str) -> tuple[Scenario, ...]:
    """Return the scenarios of a file. Raises SpecError if it is invalid, ResourceError if it cannot be read."""
    file = Path(path).expanduser()
    try:
        status = file.stat()
    except OSError as error:
        raise ResourceError(
            f"environment.scenarios: {path}: {error.strerror}; expected a JSON file of tasks, which "
            "`python -m flows.environment scenarios` writes"
        ) from None
    if status.st_size > MAX_FILE:
        raise ResourceError(
            f"environment.scenarios: {path} has {status.st_size} bytes, more than {MAX_FILE}; split the file"
        )
    return _read(str(file), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)  # a collector creates many environments with the same file
def _read(path: str, modified: int, size: int) -> tuple[Scenario, ...]:
    try:
        data = json.loads(Path(path).read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _invalid(f"{path} is not valid JSON: {error!s:.200}") from None
    except OSError as error:
        raise ResourceError(f"environment.scenarios: {path}: {error.strerror}") from None
    if not isinstance(data, list) or not data:
        raise _invalid(f"{path} contains {type(data).__name__}; expected a list of tasks")
    has_splits = any(isinstance(entry, Mapping) and entry.get("split") for entry in data)
    scenarios: dict[str, Scenario] = {}
    texts: dict[str, int] = {}
    for number, entry in enumerate(data):
        try:
            task = Task.model_validate(entry)
        except ValidationError as error:
            raise _invalid(f"{path}: task {number}: {first_problem(error)}") from None
        if has_splits and task.split is None:
            raise _invalid(f"{path}: task {number} has no split, but others have; expected train or heldout")
        if task.solution is not None and (bad := [step for step in task.solution if not _is_valid_step(step)]):
            message = 'expected {"tool": name, "arguments": {...}} or {"say": text}'
            raise _invalid(f"{path}: task {number}, solution: {bad[0]!r:.100}; {message}")
        scenario = task.scenario(number)
        if scenario.id in scenarios:
            raise _invalid(f"{path}: task {number} has the id {scenario.id} of an earlier task; ids must be unique")
        if task.task in texts:
            raise _invalid(f"{path}: task {number} duplicates task {texts[task.task]}; tasks must be unique")
        scenarios[scenario.id], texts[task.task] = scenario, number
    return tuple(scenarios.values())


def content_digest(path: str) -> str:
    """Return the digest of the file's tasks, for stage keys."""
    tasks = [[task.id, task.input, task.split, task.type, task.difficulty] for task in read_tasks(path)]
    return hashlib.sha256(json.dumps(tasks, sort_keys=True).encode()).hexdigest()


def batches(count: int, difficulties: Sequence[int]) -> list[int]:
    """Return the number of tasks of each difficulty."""
    return [len(range(index, count, len(difficulties))) for index in range(len(difficulties))]


def heldout_places(target: int) -> range:
    """Return the places of the held-out tasks among the `target` tasks of a difficulty: every fifth, or the last of
    fewer than five."""
    return range(HELD_OUT - 1, target, HELD_OUT) if target >= HELD_OUT else range(max(target - 1, 0), target)


async def write_tasks(
    author: TaskAuthor,
    tools: Sequence[Mapping[str, Any]],
    *,
    count: int,
    about: str = "",
    difficulties: Sequence[int] = tuple(DIFFICULTIES),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return `count` generated tasks for these tools, cycling through the difficulties; every fifth task of each
    difficulty is held out.

    tools: in OpenAI's JSON format. about: description of the world behind the tools, for the author's prompt. The
    author writes the tasks in batches and sees the existing ones; invalid and duplicate tasks are dropped. Raises
    EnvironmentFailed if it does not write enough tasks.
    """
    tasks: list[dict[str, Any]] = []
    for difficulty, target in zip(difficulties, batches(count, difficulties), strict=True):
        batch: list[dict[str, Any]] = []
        for attempt in range(ROUNDS * (1 + target // AT_ONCE)):
            if len(batch) == target:
                break
            existing = [task["task"] for task in [*tasks, *batch]]
            request = _request(tools, about, difficulty, min(AT_ONCE, target - len(batch)), existing)
            reply = await author.ask(
                request, seed=seed * 1009 + difficulty * 101 + attempt, max_tokens=4000, temperature=1
            )
            new = [task for task in parse_tasks(reply) if task["task"] not in existing]
            unique = list({task["task"]: task for task in new}.values())
            batch += [{**task, "difficulty": difficulty} for task in unique[: target - len(batch)]]
        if len(batch) < target:
            raise EnvironmentFailed(
                f"the author {author.model} wrote {len(batch)} of {target} tasks of difficulty {difficulty}; request "
                "fewer tasks, or use another model"
            )
        heldout = heldout_places(target)
        tasks += [{**task, "split": "heldout" if at in heldout else "train"} for at, task in enumerate(batch)]
    return tasks


def _request(
    tools: Sequence[Mapping[str, Any]], about: str, difficulty: int, count: int, existing: Sequence[str]
) -> Messages:
    lines = [
        "You write tasks for an agent that has these tools:",
        *(json.dumps(tool["function"]) for tool in tools),
        *([f"About the world behind them: {about}"] if about else []),
        f"Write {count} different tasks of difficulty {difficulty} of 5: {DIFFICULTIES[difficulty]}.",
        "Each must be solvable with these tools alone and have an answer that can be checked. Write as a user who does "
        "not know the tools.",
    ]
    if existing:
        lines += ["There are already these; write others:", *(f"- {task}" for task in existing[-40:])]
    lines.append(
        'Answer with a JSON list and nothing else: [{"task": "what the user asks", "type": "one word for its kind", '
        '"criteria": "what a right answer has to say or have done"}]'
    )
    return [{"role": "user", "content": "\n".join(lines)}]


def parse_tasks(answer: str) -> list[dict[str, Any]]:
    """Return the tasks in an author's reply; invalid entries are dropped."""
    for match in itertools.islice(re.finditer(r"\[", answer[:100_000]), 20):
        try:
            data, _ = json.JSONDecoder().raw_decode(answer, match.start())
        except (ValueError, RecursionError):
            continue
        tasks = []
        for entry in data:
            if not isinstance(entry, Mapping):
                continue
            try:
                task = Task.model_validate({name: entry.get(name, "") for name in ("task", "type", "criteria")})
            except ValidationError:
                continue
            if task.task.strip():
                tasks.append({"task": task.task.strip(), "type": task.type, "criteria": task.criteria})
        if tasks:
            return tasks
    return []


def _is_valid_step(step: Mapping[str, Any]) -> bool:
    if set(step) == {"say"}:
        return isinstance(step["say"], str)
    return set(step) == {"tool", "arguments"} and isinstance(step["tool"], str) and isinstance(step["arguments"], dict)


def _invalid(message: str) -> SpecError:
    return SpecError.at("environment.scenarios", message)
