"""Filter that keeps every scored trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.filters.protocol import ColumnFilter
from components.specs.registered import registered
from components.trajectories.schema import UNSCORED

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns


@registered("filter.everything")
class Everything(ColumnFilter):
    """Filter that keeps every scored trajectory."""

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        from components.filters.reasons import dropped

        return dropped(~episodes.scored_N, UNSCORED)
