"""What a schema is, and what the data of several are made of.

A question is text with places to fill, and a query with the same places; what fills them is drawn from the schema's
`values`, all of which occur in the data. Rows whose order is asked for are ordered without ties.

Dates are text, as `2024-03-05`. Sums of money are whole dollars.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

Rows = dict[str, list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Question:
    type: str
    """filter, aggregate, join, group, dates, nested or rank."""
    difficulty: int
    """1 one table and a condition; 2 an aggregate or one join; 3 groups, dates or two joins; 4 nested queries;
    5 ranks within groups, or several of these at once."""
    text: str
    sql: str
    ordered: bool = False
    """Whether the rows have to be in order."""


@dataclass(frozen=True)
class Schema:
    tables: str
    """The statements that create them."""
    rows: Callable[[random.Random], Rows]
    values: dict[str, Sequence[Any]]
    questions: tuple[Question, ...]


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
    return rng.sample([f"{first} {last}" for first in FIRST for last in LAST], count)


def evenly(rng: random.Random, values: Sequence[Any], count: int) -> list[Any]:
    """Each value about equally often, in any order."""
    drawn = [values[at % len(values)] for at in range(count)]
    rng.shuffle(drawn)
    return drawn


def a_day(rng: random.Random, month: int) -> date:
    """A day of one of the 36 months."""
    return date(YEARS[month // 12], month % 12 + 1, rng.randrange(1, 29))
