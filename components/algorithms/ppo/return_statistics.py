"""Running mean and deviation of the returns, by which a critic is normalised (value normalisation of MAPPO,
arXiv:2103.01955, section 5.1).

A critic learns (R - mean) / deviation, numbers of about one, whatever the unit of the rewards is; what it reads is
de-normalised before advantages are estimated: V = mean + deviation · v. So the values of a new critic, whose head is
zero, begin at the mean of the returns.

Unlike PopArt (arXiv:1602.07714), the head is not rescaled where the statistics move: all values follow the mean at
once, where a head that preserves its values has to learn the same with a small learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

SMALLEST = 1e-4
"""Smallest deviation: constant returns have none."""


@dataclass(frozen=True)
class ReturnStatistics:
    """Mean and variance of the returns of past rounds, of which the latest count most. Without a round they normalise
    nothing."""

    mean: float = 0.0
    variance: float = 1.0
    rounds: int = 0
    """Rounds whose returns are part of them."""

    @property
    def deviation(self) -> float:
        """Unit of normalised values."""
        return max(math.sqrt(self.variance), SMALLEST)

    def updated(self, returns: Sequence[float], decay: float) -> ReturnStatistics:
        """Return the statistics with the returns of another round: weighted means over the rounds, each with `decay`
        times the weight of the one after it. Returns whose variance is not finite change nothing: the guard
        `non_finite` strikes on their loss."""
        share = (1 - decay) / (1 - decay ** (self.rounds + 1))
        return_A = torch.tensor(returns, dtype=torch.float64)
        mean = (1 - share) * self.mean + share * return_A.mean().item()
        moved = self.mean - mean
        spread = (return_A - mean).square().mean().item()
        variance = (1 - share) * (self.variance + moved * moved) + share * spread
        return ReturnStatistics(mean, variance, self.rounds + 1) if math.isfinite(variance) else self

    def normalised(self, values: Sequence[float]) -> list[float]:
        """Return values as the critic learns them."""
        return [(value - self.mean) / self.deviation for value in values]

    def denormalised(self, values: Sequence[float]) -> list[float]:
        """Return values that the critic has read, in the unit of the rewards."""
        return [self.mean + self.deviation * value for value in values]
