"""Marks: requirements on a judge's measures, with the measured values (`components.evaluation.calibration`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST = ("auc", "spearman", "spearman_within", "agreement")
"""Measures whose mark is a minimum."""
MOST = ("length_bias", "position_bias", "noise", "unscored", "cost_per_thousand")
"""Measures whose mark is a maximum."""


@dataclass(frozen=True)
class Mark:
    """Requirement on one measure of a judge, with the measured value."""

    measure: str
    value: float
    measured: float | None
    least: bool
    """True: the mark is a minimum. False: a maximum of the absolute value."""

    @property
    def met(self) -> bool:
        """True if the requirement is met; False if the measured value is unknown."""
        if self.measured is None:
            return False
        return self.measured >= self.value if self.least else abs(self.measured) <= self.value

    def __str__(self) -> str:
        """Return the reason why the requirement is not met."""
        if self.measured is None:
            return f"{self.measure} is not known, and its mark is {self.value:g}"
        return f"{self.measure} is {self.measured:.3f}, {'below' if self.least else 'above'} its mark of {self.value:g}"


def judge_by(marks: Mapping[str, float], values: Mapping[str, float | None]) -> list[Mark]:
    """Return the marks with the measured value of each."""
    return [Mark(name, mark, values.get(name), name in LEAST) for name, mark in marks.items()]
