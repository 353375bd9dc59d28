"""Filter that leaves groups out, by the ids of their scenarios."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.filters.protocol import ColumnFilter
from components.specs.registered import registered

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns

LEFT_OUT = "left_out"
"""Reason: the group is one of those to leave out."""


@registered("filter.without")
class Without(ColumnFilter):
    """Filter that drops the groups of some scenarios and keeps all other scored trajectories.

    Args:
        scenarios: Ids of the scenarios to leave out.
    """

    def __init__(self, scenarios: list[str]):
        self.scenarios = frozenset(scenarios)

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        from components.filters.reasons import dropped

        return dropped(episodes.in_groups_N(self.scenarios), LEFT_OUT)
