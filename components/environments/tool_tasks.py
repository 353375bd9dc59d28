"""Tasks for tools: a file of them, and a language model that writes such a file.

The file is a JSON list. Only `task` is needed:

    {"task": "Who ordered the lamp?", "difficulty": 2, "type": "lookup", "split": "train", "id": "lamp",
     "criteria": "names Ann Lee",                     what a judge goes by
     "solution": [{"tool": "find", "arguments": {"item": "lamp"}}, {"say": "Ann Lee did."}],
     "data": {...}}                                   for a function of yours that judges

Where no task says its split, every fifth is held out. The file is read by what it holds: a run repeats as long as that
stays the same, wherever the file is and whoever wrote it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from components.environments.language_model import ServedModel
from components.environments.protocol import Messages
from components.errors import EnvironmentFailed, Problem, ResourceError, SpecError
from components.specs import Spec
from components.trajectories.schema import Scenario

MAX_FILE = 2**28
"""Bytes."""
HELD_OUT = 5
"""One in so many, where the file does not say."""
DIFFICULTIES = {
    1: "one call of one tool",
    2: "two calls, or one whose arguments need some thought",
    3: "three or four calls that build on each other",
    4: "five or more calls, or choosing among several ways",
    5: "planning ahead, combining many results, noticing what does not fit",
}
AT_ONCE = 8
"""Tasks that the author is asked for at once."""
ROUNDS = 6
"""How often it is asked for those of one difficulty before it is held to have no more."""


class Task(Spec):
    """One entry of the file."""

    task: str = Field(min_length=1, max_length=20_000)
    difficulty: int = Field(0, ge=0, le=5)
    """0 means not known."""
    type: str = Field("", max_length=100)
    split: Literal["train", "heldout"] | None = None
    id: str | None = Field(None, min_length=1, max_length=200)
    criteria: str = Field("", max_length=20_000)
    """What a right answer has to have."""
    solution: list[dict[str, Any]] | None = None
    """Calls, each {"tool", "arguments"}, and words, each {"say"}."""
    data: Any = None

    def scenario(self, number: int) -> Scenario:
        """number: its place in the file."""
        name = self.id or f"task-{hashlib.sha256(self.task.encode()).hexdigest()[:12]}"
        split = self.split or ("heldout" if number % HELD_OUT == HELD_OUT - 1 else "train")
        given: dict[str, Any] = {"task": self.task}
        if self.criteria:
            given["criteria"] = self.criteria
        if self.solution is not None:
            given["solution"] = self.solution
        if self.data is not None:
            given["data"] = self.data
        return Scenario(name, given, split, self.type or "task", self.difficulty)


class Author(ServedModel):
    """A model that writes tasks."""

    role = "author"
    key_path = "the author"


def read_tasks(path: str) -> tuple[Scenario, ...]:
    """The scenarios of a file. Raises SpecError, and ResourceError where it cannot be read."""
    file = Path(path).expanduser()
    try:
        status = file.stat()
    except OSError as error:
        raise ResourceError(
            f"environment.scenarios: {path}: {error.strerror}; expected a JSON file of tasks, which "
            "`python -m flows.scenarios` writes"
        ) from None
    if status.st_size > MAX_FILE:
        raise ResourceError(f"environment.scenarios: {path} has {status.st_size} bytes, more than {MAX_FILE}; split it")
    return _read(str(file), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)  # a collector makes many environments of the same file
def _read(path: str, modified: int, size: int) -> tuple[Scenario, ...]:
    try:
        data = json.loads(Path(path).read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{path} is no JSON: {error!s:.200}") from None
    except OSError as error:
        raise ResourceError(f"environment.scenarios: {path}: {error.strerror}") from None
    if not isinstance(data, list) or not data:
        raise _wrong(f"{path} holds {type(data).__name__}; expected a list of tasks")
    said = any(isinstance(one, Mapping) and one.get("split") for one in data)
    found: dict[str, Scenario] = {}
    texts: dict[str, int] = {}
    for number, one in enumerate(data):
        try:
            task = Task.model_validate(one)
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(part) for part in first["loc"])
            raise _wrong(f"{path}: task {number}{f', {at}' if at else ''}: {first['msg']}") from None
        if said and task.split is None:
            raise _wrong(f"{path}: task {number} has no split, and others have; expected train or heldout")
        if task.solution is not None and (bad := [step for step in task.solution if not _is_step(step)]):
            message = 'expected {"tool": name, "arguments": {...}} or {"say": text}'
            raise _wrong(f"{path}: task {number}, solution: {bad[0]!r:.100}; {message}")
        scenario = task.scenario(number)
        if scenario.id in found:
            raise _wrong(f"{path}: task {number} has the id {scenario.id} of an earlier one")
        if task.task in texts:
            raise _wrong(f"{path}: task {number} is the same as task {texts[task.task]}")
        found[scenario.id], texts[task.task] = scenario, number
    return tuple(found.values())


def content_of(path: str) -> str:
    """What stands for the file in a stage's key."""
    found = [[one.id, one.input, one.split, one.type, one.difficulty] for one in read_tasks(path)]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


async def write_tasks(
    author: Author,
    tools: Sequence[Mapping[str, Any]],
    *,
    count: int,
    about: str = "",
    difficulties: Sequence[int] = tuple(DIFFICULTIES),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """`count` tasks that these tools can do, the difficulties in turn, every fifth of each difficulty held out.

    tools: in OpenAI's JSON form. about: what the author is told of the world behind them. The author is asked for some
    at a time, is told which there are, and what it writes that is no task, or one that was there, is left out. Raises
    EnvironmentFailed where it does not write enough.
    """
    found: list[dict[str, Any]] = []
    for place, difficulty in enumerate(difficulties):
        wanted = len(range(place, count, len(difficulties)))
        mine: list[dict[str, Any]] = []
        for number in range(ROUNDS * (1 + wanted // AT_ONCE)):
            if len(mine) == wanted:
                break
            known = [one["task"] for one in [*found, *mine]]
            asked = _request(tools, about, difficulty, min(AT_ONCE, wanted - len(mine)), known)
            answer = await author.ask(
                asked, seed=seed * 1009 + difficulty * 101 + number, max_tokens=4000, temperature=1
            )
            new = [one for one in _tasks_in(answer) if one["task"] not in known]
            unique = list({one["task"]: one for one in new}.values())
            mine += [{**one, "difficulty": difficulty} for one in unique[: wanted - len(mine)]]
        if len(mine) < wanted:
            raise EnvironmentFailed(
                f"the author {author.model} wrote {len(mine)} of {wanted} tasks of difficulty {difficulty}; ask for "
                "fewer, or another model"
            )
        held = range(HELD_OUT - 1, wanted, HELD_OUT) if wanted >= HELD_OUT else range(wanted - 1, wanted)
        found += [{**one, "split": "heldout" if at in held else "train"} for at, one in enumerate(mine)]
    return found


def _request(
    tools: Sequence[Mapping[str, Any]], about: str, difficulty: int, count: int, known: Sequence[str]
) -> Messages:
    told = [
        "You write tasks for an agent that has these tools:",
        *(json.dumps(one["function"]) for one in tools),
        *([f"About the world behind them: {about}"] if about else []),
        f"Write {count} different tasks of difficulty {difficulty} of 5: {DIFFICULTIES[difficulty]}.",
        "Each must be solvable with these tools alone and have an answer that can be checked. Write as a user who does "
        "not know the tools.",
    ]
    if known:
        told += ["There are already these; write others:", *(f"- {one}" for one in known[-40:])]
    told.append(
        'Answer with a JSON list and nothing else: [{"task": "what the user asks", "type": "one word for its kind", '
        '"criteria": "what a right answer has to say or have done"}]'
    )
    return [{"role": "user", "content": "\n".join(told)}]


def _tasks_in(answer: str) -> list[dict[str, Any]]:
    """The tasks in an author's answer; what is none is left out."""
    for match in itertools.islice(re.finditer(r"\[", answer[:100_000]), 20):
        try:
            data, _ = json.JSONDecoder().raw_decode(answer, match.start())
        except (ValueError, RecursionError):
            continue
        tasks = []
        for one in data:
            if not isinstance(one, Mapping):
                continue
            try:
                task = Task.model_validate({name: one.get(name, "") for name in ("task", "type", "criteria")})
            except ValidationError:
                continue
            if task.task.strip():
                tasks.append({"task": task.task.strip(), "type": task.type, "criteria": task.criteria})
        if tasks:
            return tasks
    return []


def _is_step(step: Mapping[str, Any]) -> bool:
    if set(step) == {"say"}:
        return isinstance(step["say"], str)
    return set(step) == {"tool", "arguments"} and isinstance(step["tool"], str) and isinstance(step["arguments"], dict)


def _wrong(message: str) -> SpecError:
    return SpecError([Problem("environment.scenarios", message)])
