"""Data classes of schemas and questions, and generators that several schemas share.

A question is a text template with a query template that has the same placeholders. They are filled from the schema's
`values`, all of which occur in the data. If a question asks for an order, the order has no ties. `read_questions` reads
them from a text.

Dates are text, as `2024-03-05`. Sums of money are whole dollars.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

Rows = dict[str, list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Question:
    """Question template with its reference query."""

    type: str
    """Type of the question: filter, aggregate, join, group, dates, nested or rank."""
    difficulty: int
    """Difficulty: 1 one table and a condition; 2 an aggregate or one join; 3 groups, dates or two joins; 4 nested
    queries; 5 ranks within groups, or several of these."""
    text: str
    sql: str
    ordered: bool = False
    """True: the order of the rows matters."""


@dataclass(frozen=True)
class Schema:
    """Database schema with its data generator and questions."""

    tables: str
    """SQL statements that create the tables."""
    rows: Callable[[random.Random], Rows]
    values: dict[str, Sequence[Any]]
    questions: tuple[Question, ...]


def read_questions(text: str) -> tuple[Question, ...]:
    """Return the questions of a text: blocks of `TYPE DIFFICULTY [ordered]: QUESTION` and a query from `SELECT` on."""
    return tuple(_question(" ".join(block.split("\n"))) for block in text.strip().split("\n\n"))


def _question(block: str) -> Question:
    question, sql = re.split(r" (?=SELECT )", block, maxsplit=1)
    kind, text = question.split(": ", 1)
    type, difficulty, *order = kind.split()
    return Question(type, int(difficulty), text, sql, ordered=order == ["ordered"])


FIRST = (
    "Ana",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gia",
    "Hal",
    "Ida",
    "Jan",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pia",
)
LAST = ("Abel", "Brook", "Cole", "Dorn", "Ek", "Frost", "Gray", "Holm", "Iyer", "Jones", "Kato", "Lund", "Moss", "Nash")
CITIES = ("Bergen", "Cairo", "Lima", "Lyon", "Osaka", "Quito")
YEARS = (2022, 2023, 2024)
MONTHS = tuple(f"{month:02d}" for month in range(1, 13))


def some_names(rng: random.Random, count: int) -> list[str]:
    """Return `count` different names of people."""
    return rng.sample([f"{first} {last}" for first in FIRST for last in LAST], count)


def evenly(rng: random.Random, values: Sequence[Any], count: int) -> list[Any]:
    """Return `count` values in random order, each value about equally often."""
    shuffled = [values[index % len(values)] for index in range(count)]
    rng.shuffle(shuffled)
    return shuffled


def a_day(rng: random.Random, month: int) -> date:
    """Return a random day of one of the 36 months."""
    return date(YEARS[month // 12], month % 12 + 1, rng.randrange(1, 29))
