"""Keeps what is worth imitating: filtered behaviour cloning."""

from __future__ import annotations

from collections.abc import Sequence

from components.filters.decisions import decide_each
from components.specs.registered import registered
from components.trajectories.schema import Selection, Trajectory

NO_SUCCESS = "no_success"
"""Reason: the environment does not call the episode a success."""


@registered("filter.successful")
class Successful:
    """Keeps trajectories that the environment calls a success, whatever their reward."""

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return decide_each(group, lambda one: None if one.success else NO_SUCCESS)
