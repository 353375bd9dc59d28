"""Metrics of the values of a critic, added up over the packs of a gradient step."""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import torch

SPREAD = 1e-6
"""Variance of normalised returns below which there is nothing to explain."""


def add_values(sums: MutableMapping[str, float], value_S: torch.Tensor, return_S: torch.Tensor) -> None:
    """Add the sums that `explained_variance` reads, of values and what they should be."""
    for name, each_S in (("errors", (return_S - value_S).double()), ("returns", return_S.double())):
        sums[name] = sums.get(name, 0.0) + each_S.sum().item()
        sums[f"{name} squared"] = sums.get(f"{name} squared", 0.0) + each_S.square().sum().item()


def explained_variance(sums: MutableMapping[str, float], count: int) -> float:
    """Return 1 - Var(R - V) / Var(R) of `count` values: 1 where values are what comes, 0 where they say no more than
    its mean; NaN where everything comes to the same."""

    def variance(name: str) -> float:
        return sums[f"{name} squared"] / count - (sums[name] / count) ** 2

    spread = variance("returns")
    return 1 - variance("errors") / spread if spread > SPREAD else math.nan
