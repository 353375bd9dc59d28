"""Filter for filtered behaviour cloning: it keeps successful episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.filters.protocol import ColumnFilter
from components.specs.registered import registered
from components.trajectories.reads import OUTCOME

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns

NO_SUCCESS = "no_success"
"""Reason: the environment does not report success."""


@registered("filter.successful")
class Successful(ColumnFilter):
    """Filter that keeps scored trajectories for which the environment reports success, whatever their reward."""

    reads = frozenset({OUTCOME})

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        from components.filters.reasons import dropped

        return dropped(~episodes.success_N, NO_SUCCESS)
