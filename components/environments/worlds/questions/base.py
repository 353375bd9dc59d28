"""Questions over a small world of data that only the tools can read; the submitted answer is compared by value.

A scenario is a question in a world. Worlds are generated from a seed; a few scenarios of one split share a world, and
the splits share none. The generator of a question calls the tools as an agent would, so its calls are a solution, and
their number determines the difficulty.
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
from components.environments.restorable import RestorableState
from components.environments.tools import call, tool
from components.trajectories.schema import Scenario

PER_WORLD = 8
"""Scenarios per world."""
LEVELS = (2, 3, 5, 7)
"""Maximum number of calls before `submit` of difficulties 1, 2, 3 and 4; more calls are difficulty 5."""
LONGEST = 500
"""Maximum number of characters of an answer."""

Answer = int | float | str | list[str]
Look = Callable[..., Any]
"""Function that calls a tool by name with arguments and returns its parsed result."""
QuestionAndAnswer = tuple[str, Answer]


class Redraw(Exception):
    """A random draw with no answer, or no unique one."""


def require(fits: bool) -> None:
    """Raise Redraw if a draw does not fit."""
    if not fits:
        raise Redraw


class Questions(RestorableState):
    """Questions over a small world of data that only the tools can read. Subclasses define the tools, which return JSON
    from `self.data`, the generator `world`, and a method `ask_FORM` for each form of question.

    seed: seed of the worlds and questions. train, heldout: scenarios of the two splits.
    """

    saved = ("submitted",)

    about: ClassVar[str]
    """Description of the world for the system prompt."""
    data: dict[str, Any]
    """World of the current scenario."""

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
        """Generate a world."""

    @classmethod
    def forms(cls) -> list[str]:
        """Return the forms of question."""
        return [name.removeprefix("ask_") for name in vars(cls) if name.startswith("ask_")]

    def begin(self, scenario: Scenario) -> str:
        self.data = _world(type(self), scenario.input["world"])
        self.submitted: str | None = None
        return str(scenario.input["question"])

    @tool
    def submit(self, answer: str) -> str:
        """Gives the answer, which ends the task."""
        self.submitted, self.done = answer[:LONGEST], True
        return "submitted"

    def on_message(self, text: str) -> Messages:
        self.done = True  # ends without a submitted answer
        return []

    def outcome(self, answer: str) -> dict[str, Any]:
        submitted = self.submitted
        right = submitted is not None and same(submitted, self.scenario.input["answer"])
        return {"success": right, "submitted": submitted is not None}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        answer = scenario.input["answer"]
        text = ", ".join(answer) if isinstance(answer, list) else str(answer)
        calls = [*scenario.input["solution"], ["submit", {"answer": text}]]
        return [call(name, arguments, number) for number, (name, arguments) in enumerate(calls)]


def same(submitted: str, expected: Answer) -> bool:
    """Return True if a submitted text is the expected answer.

    Numbers are compared by value, with or without a unit; names ignoring case; several names in any order.
    """
    if isinstance(expected, list):
        names = [_normalized(name) for name in re.split(r",|;|\band\b", submitted)]
        return sorted(name for name in names if name) == sorted(_normalized(name) for name in expected)
    if isinstance(expected, str):
        return _normalized(submitted) == _normalized(expected)
    number = re.fullmatch(r"\s*+(-?\d{1,9}(?:\.\d{1,6})?)\s*+[^\W\d]*+\.?\s*+", submitted)
    return number is not None and abs(float(number.group(1)) - expected) < 1e-6


def require_unique(keys: Sequence[Any]) -> None:
    """Raise Redraw if another key equals the first of the sorted keys: a question about it has several answers."""
    require(len(keys) < 2 or keys[0] != keys[1])


def _normalized(text: str) -> str:
    return " ".join(text.strip(" .\"'\n\t").casefold().split())


@functools.lru_cache(maxsize=256)
def _world(kind: type[Questions], key: str) -> dict[str, Any]:
    return kind.world(random.Random(key))


@functools.lru_cache(maxsize=8)  # a collector creates many environments with the same scenarios
def _generate(kind: type[Questions], seed: int, train: int, heldout: int) -> tuple[Scenario, ...]:
    if not train + heldout:
        return ()
    environment, name, forms = kind(train=0, heldout=0), kind.__name__.lower(), kind.forms()
    scenarios: list[Scenario] = []
    for split, count in (("train", train), ("heldout", heldout)):
        questions: set[tuple[str, str]] = set()
        draw = random.Random(f"{name} {seed} {split}")
        for index in range(count):
            form, number = forms[index % len(forms)], f"{name}-{seed}-{split}-{index}"
            scenario = None
            for attempt in range(1000):
                # Use another world after 50 attempts: this one may have no more questions of the form.
                suffix = f" {attempt // 50}" if attempt >= 50 else ""
                world = f"{name} {seed} {split} {index // PER_WORLD}{suffix}"
                scenario = _scenario(environment, number, split, form, world, draw)
                if scenario is not None and (world, scenario.input["question"]) not in questions:
                    break
            assert scenario is not None, f"no question of form {form}"
            questions.add((scenario.input["world"], scenario.input["question"]))
            scenarios.append(scenario)
    return tuple(scenarios)


def _scenario(
    environment: Questions, name: str, split: str, form: str, world: str, draw: random.Random
) -> Scenario | None:
    environment.data = _world(type(environment), world)
    solution: list[Any] = []

    def look(tool: str, /, **arguments: Any) -> Any:
        solution.append([tool, arguments])
        return json.loads(getattr(environment, tool)(**arguments))

    try:
        question, answer = getattr(environment, f"ask_{form}")(look, draw)
    except Redraw:
        return None
    if isinstance(answer, str) and answer in question:
        return None
    difficulty = 1 + sum(len(solution) > limit for limit in LEVELS)
    scenario_input = {"world": world, "question": question, "answer": answer, "solution": solution}
    return Scenario(name, scenario_input, split, form, difficulty)
