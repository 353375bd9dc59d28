"""Keeps what is worth imitating: filtered behaviour cloning."""

from __future__ import annotations

from collections.abc import Sequence

from components.filters.select import decide
from components.trajectories.schema import Selection, Trajectory

BELOW_THRESHOLD = "below_threshold"
"""Reason: the reward is lower than the threshold."""


class Successful:
    """Keeps trajectories whose reward is at least a threshold.

    Args:
        threshold: Lowest reward that is kept. The default 1.0 is success under the plain Outcome reward; a reward that
            charges for turns needs a lower one.
    """

    def __init__(self, threshold: float = 1.0):
        self.threshold = threshold

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return [decide(trajectory, self._rule(trajectory)) for trajectory in group]

    def _rule(self, trajectory: Trajectory) -> str | None:
        below = trajectory.reward is not None and trajectory.reward < self.threshold
        return BELOW_THRESHOLD if below else None
