"""Sums of metrics over the packs of a gradient step.

They stay on the device until the step ends, because reading a number waits for everything that the device was told to
compute, and meanwhile the host gives it nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from components.algorithms.loop import distributed


class Sums:
    """Sums by name, in float64."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, ...], torch.Tensor] = {}

    @torch.no_grad()
    def add(self, columns: Mapping[str, torch.Tensor], *, real: bool = True) -> None:
        """Add the sum of each column; those of one call have the same shape. real: False adds 0, for a pack that does
        not count (`distributed.share`)."""
        names, column_KX = tuple(columns), torch.stack([torch.atleast_1d(column) for column in columns.values()])
        total_K = column_KX.sum(1, dtype=torch.float64) if real else column_KX.new_zeros(len(names)).double()
        self._totals[names] = self._totals[names] + total_K if names in self._totals else total_K

    def totals(self) -> dict[str, float]:
        """Return the sums over all processes, which must all call this and have added the same names. Waits for the
        device."""
        totals: dict[str, float] = {}
        if not self._totals:
            return totals
        values = distributed.all_reduce_sum(torch.cat(list(self._totals.values()))).tolist()
        for name, value in zip((name for names in self._totals for name in names), values, strict=True):
            totals[name] = totals.get(name, 0.0) + value
        return totals
