"""Filter for filtered behaviour cloning: it keeps successful episodes."""

from __future__ import annotations

from collections.abc import Sequence

from components.filters.decisions import decide_each
from components.specs.registered import registered
from components.trajectories.schema import Selection, Trajectory

NO_SUCCESS = "no_success"
"""Reason: the environment does not report success."""


@registered("filter.successful")
class Successful:
    """Filter that keeps scored trajectories for which the environment reports success, whatever their reward."""

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return decide_each(group, lambda trajectory: None if trajectory.success else NO_SUCCESS)
