"""Metrics of a critic's values, summed over the packs of a gradient step."""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import torch

SPREAD = 1e-6
"""Variance of the normalised returns below which the explained variance is undefined."""


def add_values(sums: MutableMapping[str, float], value_S: torch.Tensor, return_S: torch.Tensor) -> None:
    """Add to `sums` the sums that `explained_variance` reads, from values and their targets."""
    for name, column_S in (("errors", (return_S - value_S).double()), ("returns", return_S.double())):
        sums[name] = sums.get(name, 0.0) + column_S.sum().item()
        sums[f"{name} squared"] = sums.get(f"{name} squared", 0.0) + column_S.square().sum().item()


def explained_variance(sums: MutableMapping[str, float], count: int) -> float:
    """Return 1 - Var(R - V) / Var(R) of `count` values: 1 if values equal the returns, 0 if they are no better than the
    mean return; NaN if the returns have no variance."""

    def variance(name: str) -> float:
        return sums[f"{name} squared"] / count - (sums[name] / count) ** 2

    spread = variance("returns")
    return 1 - variance("errors") / spread if spread > SPREAD else math.nan
