"""Questions over a small world of data that only tools can see; the answer is submitted and checked by its value.

A scenario is a question in a world. Worlds are made from a seed and shared by a few scenarios of one split, never by
both. A question is written by answering it: its writer calls the tools as an agent would, so the calls are a solution,
and their number says how difficult it is.
"""

from __future__ import annotations

import abc
import functools
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from components.environments.protocol import Messages
from components.environments.tools import ToolEnvironment, call, tool
from components.trajectories.schema import Scenario

PER_WORLD = 8
"""Scenarios in a world."""
LEVELS = (2, 3, 5, 7)
"""Most calls before `submit` of difficulty 1, 2, 3 and 4; more are 5."""
LONGEST = 500
"""Characters of an answer."""

Answer = int | float | str | list[str]
Look = Callable[..., Any]
"""Calls a tool by name, with its arguments; what it told, read."""
Asked = tuple[str, Answer] | None
"""A question and its answer, or None where the draw has none (or two)."""


class Questions(ToolEnvironment):
    """To be subclassed: with tools that answer in JSON from `self.data`, `world`, and a method `ask_FORM` for each form
    of question.

    seed: of the worlds and questions. train, heldout: scenarios of the two splits.
    """

    about: ClassVar[str]
    """What the agent must know of the world, for the first message."""
    data: dict[str, Any]
    """The world that is played in."""

    def __init__(
        self,
        seed: int = 0,
        train: Annotated[int, Field(ge=0, le=4000)] = 512,
        heldout: Annotated[int, Field(ge=0, le=4000)] = 128,
    ):
        self.system = (
            f"Answer the question with the tools, then call submit. {self.about} Submit only the answer itself: a "
            "number, a date such as 2031-03-02, a name, or several names with commas between."
        )
        self._scenarios = _generate(type(self), seed, train, heldout)

    @classmethod
    @abc.abstractmethod
    def world(cls, draw: random.Random) -> dict[str, Any]:
        """A world."""

    @classmethod
    def forms(cls) -> list[str]:
        return [name.removeprefix("ask_") for name in vars(cls) if name.startswith("ask_")]

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return [scenario for scenario in self._scenarios if scenario.split == split]

    def begin(self, scenario: Scenario) -> str:
        self.data = _world(type(self), scenario.input["world"])
        self.submitted: str | None = None
        return str(scenario.input["question"])

    @tool
    def submit(self, answer: str) -> str:
        """Gives the answer, which ends the task."""
        self.submitted, self.done = answer[:LONGEST], True
        return "submitted"

    def said(self, text: str) -> Messages:
        self.done = True  # without an answer
        return []

    def outcome(self, answer: str) -> dict[str, Any]:
        given = self.submitted
        right = given is not None and same(given, self.scenario.input["answer"])
        return {"success": right, "submitted": given is not None}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        answer = scenario.input["answer"]
        text = ", ".join(answer) if isinstance(answer, list) else str(answer)
        calls = [*scenario.input["solution"], ["submit", {"answer": text}]]
        return [call(name, arguments, number) for number, (name, arguments) in enumerate(calls)]

    def save(self) -> list[Any]:
        return [self.submitted, self.done, self.invalid_actions]

    def restore(self, scenario: Scenario, state: list[Any]) -> None:
        self.reset(scenario)
        self.submitted, self.done, self.invalid_actions = state


def same(given: str, right: Answer) -> bool:
    """Whether a submitted text is the answer: numbers by value, with a unit or without; names in any case; several
    names in any order."""
    if isinstance(right, list):
        names = [_bare(name) for name in re.split(r",|;|\band\b", given)]
        return sorted(name for name in names if name) == sorted(_bare(name) for name in right)
    if isinstance(right, str):
        return _bare(given) == _bare(right)
    number = re.fullmatch(r"\s*+(-?\d{1,9}(?:\.\d{1,6})?)\s*+[^\W\d]*+\.?\s*+", given)
    return number is not None and abs(float(number.group(1)) - right) < 1e-6


def only(keys: Sequence[Any]) -> bool:
    """Whether the greatest (or least) of them is one alone, for questions after it. keys: in order."""
    return len(keys) < 2 or keys[0] != keys[1]


def told(**fields: Any) -> str:
    """What a tool tells: JSON on one line."""
    return json.dumps(fields)


def _bare(text: str) -> str:
    return " ".join(text.strip(" .\"'\n\t").casefold().split())


@functools.lru_cache(maxsize=256)
def _world(kind: type[Questions], key: str) -> dict[str, Any]:
    return kind.world(random.Random(key))


@functools.lru_cache(maxsize=8)  # a collector makes many environments of the same scenarios
def _generate(kind: type[Questions], seed: int, train: int, heldout: int) -> tuple[Scenario, ...]:
    if not train + heldout:
        return ()
    environment, name, forms = kind(train=0, heldout=0), kind.__name__.lower(), kind.forms()
    found: list[Scenario] = []
    for split, count in (("train", train), ("heldout", heldout)):
        asked: set[tuple[str, str]] = set()
        draw = random.Random(f"{name} {seed} {split}")
        for index in range(count):
            form, number = forms[index % len(forms)], f"{name}-{seed}-{split}-{index}"
            one = None
            for attempt in range(1000):
                spare = f" {attempt // 50}" if attempt >= 50 else ""  # a world in which this form has no more questions
                world = f"{name} {seed} {split} {index // PER_WORLD}{spare}"
                one = _scenario(environment, number, split, form, world, draw)
                if one is not None and (world, one.input["question"]) not in asked:
                    break
            assert one is not None, f"no question of form {form}"
            asked.add((one.input["world"], one.input["question"]))
            found.append(one)
    return tuple(found)


def _scenario(
    environment: Questions, name: str, split: str, form: str, world: str, draw: random.Random
) -> Scenario | None:
    environment.data = _world(type(environment), world)
    solution: list[Any] = []

    def look(tool: str, /, **arguments: Any) -> Any:
        solution.append([tool, arguments])
        return json.loads(getattr(environment, tool)(**arguments))

    asked: Asked = getattr(environment, f"ask_{form}")(look, draw)
    if asked is None:
        return None
    question, answer = asked
    if isinstance(answer, str) and answer in question:
        return None
    difficulty = 1 + sum(len(solution) > most for most in LEVELS)
    given = {"world": world, "question": question, "answer": answer, "solution": solution}
    return Scenario(name, given, split, form, difficulty)
