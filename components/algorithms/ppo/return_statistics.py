"""Running mean and standard deviation of the returns, which normalise a critic's targets (value normalisation of MAPPO,
arXiv:2103.01955, section 5.1).

A critic learns (R - mean) / deviation, which is of order one for any unit of the rewards. Its outputs are denormalised
before advantages are estimated: V = mean + deviation · v. So the values of a new critic, whose head is zero, start at
the mean of the returns.

Unlike PopArt (arXiv:1602.07714), the head is not rescaled when the statistics change: all values follow the mean at
once, whereas a head that preserves its outputs would have to learn the new mean with a small learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

SMALLEST = 1e-4
"""Lower limit of the standard deviation, because constant returns have none."""


@dataclass(frozen=True)
class ReturnStatistics:
    """Mean and variance of the returns of past rounds, with exponential decay. Before the first round they are 0 and
    1."""

    mean: float = 0.0
    variance: float = 1.0
    rounds: int = 0
    """Number of rounds whose returns are included."""

    @property
    def deviation(self) -> float:
        """Return the standard deviation, at least `SMALLEST`."""
        return max(math.sqrt(self.variance), SMALLEST)

    def updated(self, returns: Sequence[float], decay: float) -> ReturnStatistics:
        """Return the statistics with the returns of another round: weighted means over the rounds, each with `decay`
        times the weight of the next one. If the variance of the returns is not finite, the statistics stay unchanged;
        the guard `non_finite` then strikes on the loss."""
        share = (1 - decay) / (1 - decay ** (self.rounds + 1))
        return_A = torch.tensor(returns, dtype=torch.float64)
        mean = (1 - share) * self.mean + share * return_A.mean().item()
        shift = self.mean - mean
        spread = (return_A - mean).square().mean().item()
        variance = (1 - share) * (self.variance + shift * shift) + share * spread
        return ReturnStatistics(mean, variance, self.rounds + 1) if math.isfinite(variance) else self

    def normalised(self, values: Sequence[float]) -> list[float]:
        """Return the normalised values, as the critic learns them."""
        return [(value - self.mean) / self.deviation for value in values]

    def denormalised(self, values: Sequence[float]) -> list[float]:
        """Return values of the critic in the unit of the rewards."""
        return [self.mean + self.deviation * value for value in values]
