"""Scores in a judge's answer, on a declared scale.

The scale stands in the prompt and in the schema of the answer, and numbers are read on it. A number outside of it shows
that the judge used another scale, which cannot be inferred: 1 is the best score of one scale and a bad one of another.
So neither this number nor those beside it are read. `8/10` and `40%` state a scale of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from components.rewards.llm.rows import as_number

_FRACTION = re.compile(r"^\s*([-+]?\d+(?:\.\d+)?)\s*(?:/|out of|of)\s*(\d+(?:\.\d+)?)\s*$", re.I)
_PERCENT = re.compile(r"^\s*([-+]?\d+(?:\.\d+)?)\s*%\s*$")


class Scale(NamedTuple):
    """Scale of scores, from the worst to the best."""

    low: float = 0.0
    high: float = 1.0

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"

    @property
    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a score."""
        return {"type": "number", "minimum": self.low, "maximum": self.high}

    def at(self, share: float) -> float:
        """Return the score at a share of the scale."""
        return self.low + share * (self.high - self.low)


UNIT = Scale()
"""Scale of the judges' scores, unless their question declares another one."""


def read_scores(raw_scores: Mapping[str, Any], scale: Scale = UNIT) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Return the scores as shares of the scale, from 0 to 1, by name, and the problems with the names they affect.

    A number may be written as text. If a plain number lies outside of the scale, all plain numbers are left out.
    """
    plain: dict[str, float] = {}
    stated: dict[str, float] = {}
    for name, value in raw_scores.items():
        if (fraction := _fraction(value)) is not None:
            stated[name] = fraction
        elif (number := as_number(value)) is not None:
            plain[name] = (number - scale.low) / (scale.high - scale.low)
    outside = [name for name, share in (plain | stated).items() if not 0 <= share <= 1]
    readable = stated | ({} if any(name in plain for name in outside) else plain)
    problems = {
        "has no score that is a number for": [name for name in raw_scores if name not in plain and name not in stated],
        f"has a score that is not from {scale} for": [name for name in raw_scores if name in outside],
    }
    return {name: readable[name] for name in raw_scores if name in readable and name not in outside}, problems


def _fraction(value: Any) -> float | None:
    if not isinstance(value, str):
        return None
    if match := _PERCENT.match(value):
        return float(match[1]) / 100
    if (match := _FRACTION.match(value)) and float(match[2]) > 0:
        return float(match[1]) / float(match[2])
    return None
