"""Arithmetic word problems of one to six steps, answered in one message, without tools.

A story begins with a number and changes it by additions, subtractions, multiplications and divisions. All numbers are
whole, from 2 to 100, so that a small model can learn the steps; the texts are short, so that they fit a short context.

A problem belongs to a split by a hash of its numbers and operations: training with any seed never contains the
calculation of a held-out problem of any seed.
"""

from __future__ import annotations

import hashlib
import operator
import random
import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from components.environments.seeded import Count, GeneratedScenarios
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LEVELS = (1, 2, 3, 4, 5, 6)
"""Difficulties: numbers of steps."""
LARGEST = 100
"""Largest number of a story and of its results."""
LARGEST_FACTOR = 5
"""Largest factor and divisor."""
HELD_OUT = 5
"""Every n-th calculation, by its hash, belongs to the held-out split."""
FINAL = re.compile(r"####\s*(-?[0-9]{1,12})\b")
"""Final answer of a message; the last one counts."""
SYSTEM = "Solve the problem. Write one calculation per line, then #### and the answer."

NAMES = ("Ana", "Ben", "Eva", "Jim", "Kim", "Leo", "Mia", "Sam", "Tom", "Zoe")
GOODS = ("apples", "balls", "books", "cards", "coins", "eggs", "keys", "pens", "shells", "stamps")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


class Story(NamedTuple):
    """Sentences of a type of problem. `{name}`, `{goods}` and `{n}` stand for the person, the things and the number."""

    begin: str
    changes: dict[str, tuple[str, ...]]
    """Sentences for each operation."""
    question: str


STORIES = {
    "things": Story(
        "{name} has {n} {goods}.",
        {
            "+": ("{name} buys {n} more.", "{name} finds {n} more.", "{name} gets {n} from a friend."),
            "-": ("{name} gives {n} away.", "{name} loses {n}.", "{name} sells {n}."),
            "*": ("Now {name} gets {n} times as many in exchange.",),
            "/": ("{name} keeps one of {n} equal parts.",),
        },
        "How many {goods} does {name} have now?",
    ),
    "money": Story(
        "{name} has {n} dollars.",
        {
            "+": ("{name} earns {n} dollars.", "{name} is given {n} dollars."),
            "-": ("{name} spends {n} dollars.", "{name} pays {n} dollars."),
            "*": ("The money grows to {n} times as much.",),
            "/": ("{name} splits it into {n} equal shares and keeps one.",),
        },
        "How many dollars does {name} have now?",
    ),
    "points": Story(
        "{name}'s team has {n} points.",
        {
            "+": ("It scores {n} points.", "It wins {n} more points."),
            "-": ("It loses {n} points.", "A foul costs it {n} points."),
            "*": ("A bonus multiplies its points by {n}.",),
            "/": ("A penalty divides its points by {n}.",),
        },
        "How many points does it have now?",
    ),
}


@registered("environment.arithmetic")
class Arithmetic(GeneratedScenarios):
    """Arithmetic word problems; the answer is one message that ends in `#### NUMBER`.

    Scenario types: things, money, points. Difficulty: the number of steps. The outcome also holds `progress`, the share
    of the steps that the message calculates, from the first one on, and `answered`, whether it has a final answer.

    Args:
        seed: Generator seed.
        train, heldout: Number of problems of the split.
        difficulties: Numbers of steps from 1 to 6, in rotation.
    """

    name = "arithmetic"
    possible = LEVELS
    system = SYSTEM

    def __init__(
        self,
        seed: int = 0,
        train: Count = 512,
        heldout: Count = 128,
        difficulties: Annotated[Sequence[Annotated[int, Field(ge=1, le=6)]], Field(min_length=1)] = LEVELS,
    ):
        super().__init__(seed, train, heldout, difficulties)

    @staticmethod
    def task(rng: random.Random, difficulty: int, split: str) -> tuple[str, dict[str, Any]]:
        """Draw a problem of a split; return its type and its input."""
        start, changes = _calculation(rng, difficulty)
        while split_of(start, changes) != split:
            start, changes = _calculation(rng, difficulty)
        kind = rng.choice(tuple(STORIES))
        story, words = STORIES[kind], {"name": rng.choice(NAMES), "goods": rng.choice(GOODS)}
        sentences, steps, value = [story.begin.format(n=start, **words)], [], start
        for sign, number in changes:
            sentences.append(rng.choice(story.changes[sign]).format(n=number, **words))
            result = OPERATIONS[sign](value, number)
            steps.append(f"{value} {sign} {number} = {result}")
            value = result
        question = " ".join([*sentences, story.question.format(**words)])
        return kind, {"question": question, "steps": steps, "answer": str(value)}

    def begin(self, scenario: Scenario) -> str:
        return str(scenario.input["question"])

    def legal_actions(self) -> list[str]:
        """Return a final answer for each possible number, without steps."""
        return [f"#### {number}" for number in range(2, LARGEST + 1)]

    def outcome(self, answer: str) -> dict[str, Any]:
        final = FINAL.findall(answer)
        success = bool(final) and int(final[-1]) == int(self.scenario.input["answer"])
        return {"success": success, "progress": self._progress(answer), "answered": bool(final)}

    def _progress(self, answer: str) -> float:
        lines = ["".join(line.split()) for line in answer.splitlines()]
        steps = ["".join(step.split()) for step in self.scenario.input["steps"]]
        correct = 0
        for line in lines:
            correct += correct < len(steps) and line == steps[correct]
        return correct / len(steps)

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return one message: a line for each step, and the final answer."""
        lines = [*scenario.input["steps"], f"#### {scenario.input['answer']}"]
        return [{"role": "assistant", "content": "\n".join(lines)}]


def split_of(start: int, changes: Sequence[tuple[str, int]]) -> str:
    """Return the split of a calculation: a function of its numbers and operations alone."""
    calculation = " ".join([str(start), *(f"{sign} {number}" for sign, number in changes)])
    return "train" if int(hashlib.sha256(calculation.encode()).hexdigest(), 16) % HELD_OUT else "heldout"


def _calculation(rng: random.Random, steps: int) -> tuple[int, list[tuple[str, int]]]:
    """Draw a first number, and an operation with its number for each step."""
    start = value = rng.randint(2, LARGEST - 1)
    changes: list[tuple[str, int]] = []
    while len(changes) < steps:
        numbers = _numbers(value, sign := rng.choice(tuple(OPERATIONS)))
        if numbers:
            changes.append((sign, rng.choice(numbers)))
            value = OPERATIONS[sign](value, changes[-1][1])
    return start, changes


def _numbers(value: int, sign: str) -> Sequence[int]:
    """Return the numbers that an operation may have after a result, so that the next one is from 2 to `LARGEST`."""
    factors = range(2, LARGEST_FACTOR + 1)
    if sign == "+":
        return range(2, LARGEST - value + 1)
    if sign == "-":
        return range(2, value - 1)
    if sign == "*":
        return [factor for factor in factors if value * factor <= LARGEST]
    return [factor for factor in factors if value % factor == 0 and value > factor]
