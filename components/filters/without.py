"""Filter that leaves groups out, by the ids of their scenarios."""

from __future__ import annotations

from collections.abc import Sequence

from components.filters.decisions import decide_each
from components.specs.registered import registered
from components.trajectories.schema import Selection, Trajectory

LEFT_OUT = "left_out"
"""Reason: the group is one of those to leave out."""


@registered("filter.without")
class Without:
    """Filter that drops the groups of some scenarios and keeps all other scored trajectories.

    Args:
        scenarios: Ids of the scenarios to leave out.
    """

    def __init__(self, scenarios: list[str]):
        self.scenarios = frozenset(scenarios)

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return decide_each(group, lambda trajectory: LEFT_OUT if trajectory.group in self.scenarios else None)
