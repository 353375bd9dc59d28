"""Marks: what is asked of a judge, and whether it was found (`components.evaluation.calibration`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST = ("auc", "spearman", "spearman_within", "agreement")
"""Measures of which a mark is the least that is good."""
MOST = ("length_bias", "position_bias", "noise", "unscored", "cost_per_thousand")
"""Measures of which it is the most."""


@dataclass(frozen=True)
class Mark:
    """What is asked of a judge."""

    measure: str
    value: float
    found: float | None
    least: bool
    """Whether the mark is the least that is good; else the most, of the size without its sign."""

    @property
    def met(self) -> bool:
        """False where the measure is not known."""
        if self.found is None:
            return False
        return self.found >= self.value if self.least else abs(self.found) <= self.value

    def __str__(self) -> str:
        """Why it is not met."""
        if self.found is None:
            return f"{self.measure} is not known, and its mark is {self.value:g}"
        return f"{self.measure} is {self.found:.3f}, {'below' if self.least else 'above'} its mark of {self.value:g}"


def judge_by(marks: Mapping[str, float], found: Mapping[str, float | None]) -> list[Mark]:
    """The marks with what was found of each."""
    return [Mark(name, value, found.get(name), name in LEAST) for name, value in marks.items()]
