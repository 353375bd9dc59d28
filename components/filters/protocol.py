"""The filter protocol: which trajectories of a group are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from components.trajectories.schema import Selection, Trajectory

KEPT = "kept"
"""Reason of every selection that keeps."""
UNSCORED = "unscored"
"""Reason of every selection that drops a trajectory without a reward. All filters here drop them."""


@runtime_checkable
class Filter(Protocol):
    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        """One decision for each trajectory of one scenario, rewards joined on, in the same order."""
        ...
