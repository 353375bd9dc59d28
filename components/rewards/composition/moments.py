"""Running mean and standard deviation (Welford's method)."""

from __future__ import annotations

import math


class Moments:
    """Running moments; without values, both are 0."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        """Update the moments with a value."""
        self.count += 1
        difference = value - self.mean
        self.mean += difference / self.count
        self._squares += difference * (value - self.mean)

    @property
    def std(self) -> float:
        """Standard deviation of the population; 0 for a single value."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0
