"""Filter that keeps the best episodes of each scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from components.filters.protocol import ColumnFilter
from components.specs.registered import registered

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns

NOT_AMONG_BEST = "not_among_best"
"""Reason: `count` episodes of the group have a higher reward, or an equal reward and an earlier position."""


@registered("filter.best")
class Best(ColumnFilter):
    """Filter that keeps the episodes with the highest rewards of each group. Ties go to the earlier episode.

    Args:
        count: EpisodeColumns kept per group. A smaller group is kept whole.
    """

    def __init__(self, count: Annotated[int, Field(ge=1)] = 1):
        self.count = count

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        from components.filters.reasons import dropped

        return dropped(episodes.rank_N() >= self.count, NOT_AMONG_BEST)
