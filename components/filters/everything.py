"""Filter that keeps every scored trajectory."""

from __future__ import annotations

from collections.abc import Sequence

from components.filters.decisions import decide_each
from components.specs.registered import registered
from components.trajectories.schema import Selection, Trajectory


@registered("filter.everything")
class Everything:
    """Filter that keeps every scored trajectory."""

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return decide_each(group, lambda trajectory: None)
