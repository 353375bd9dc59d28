"""Filter for algorithms that compare rewards within a group: it drops groups without a learning signal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from components.filters.protocol import ColumnFilter
from components.specs.registered import registered
from components.trajectories.groups import RELATIVE_TOLERANCE, have_spread

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns

NO_SPREAD = "no_spread"
"""Reason: the scored trajectories of the group have equal rewards, so every advantage would be 0."""


@registered("filter.signal")
class Signal(ColumnFilter):
    """Filter that drops groups whose rewards are all equal, and unscored trajectories of the other groups.

    Args:
        relative_tolerance: Rewards are equal if max - min <= relative_tolerance · max(|max|, |min|). It is relative,
            so the scale of the reward does not matter; the default only absorbs rounding errors. 0 or more, below 1.
    """

    def __init__(self, relative_tolerance: Annotated[float, Field(ge=0, lt=1)] = RELATIVE_TOLERANCE):
        self.relative_tolerance = relative_tolerance

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        import numpy as np

        from components.filters.reasons import dropped

        pairs = zip(*(rewards_G.tolist() for rewards_G in episodes.reward_range()), strict=True)
        spread_G = np.array([have_spread(pair, self.relative_tolerance) for pair in pairs], bool)
        return dropped(~spread_G[episodes.group_N], NO_SPREAD)
