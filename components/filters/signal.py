"""Filter for algorithms that compare rewards within a group: it drops groups without a learning signal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from components.filters.decisions import decide
from components.specs.registered import registered
from components.trajectories.groups import RELATIVE_TOLERANCE, have_spread
from components.trajectories.schema import Selection, Trajectory

NO_SPREAD = "no_spread"
"""Reason: the scored trajectories of the group have equal rewards, so every advantage would be 0."""


@registered("filter.signal")
class Signal:
    """Filter that drops groups whose rewards are all equal, and unscored trajectories of the other groups.

    Args:
        relative_tolerance: Rewards are equal if max - min <= relative_tolerance · max(|max|, |min|). It is relative,
            so the scale of the reward does not matter; the default only absorbs rounding errors. 0 or more, below 1.
    """

    def __init__(self, relative_tolerance: Annotated[float, Field(ge=0, lt=1)] = RELATIVE_TOLERANCE):
        self.relative_tolerance = relative_tolerance

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        rewards = [trajectory.reward for trajectory in group if trajectory.reward is not None]
        rule = None if have_spread(rewards, self.relative_tolerance) else NO_SPREAD
        return [decide(trajectory, rule) for trajectory in group]
