"""Filter that keeps the best episodes of each scenario."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from components.filters.decisions import best_first, decide_each
from components.specs.registered import registered
from components.trajectories.schema import Selection, Trajectory

NOT_AMONG_BEST = "not_among_best"
"""Reason: `count` episodes of the group have a higher reward, or an equal reward and an earlier position."""


@registered("filter.best")
class Best:
    """Filter that keeps the episodes with the highest rewards of each group. Ties go to the earlier episode.

    Args:
        count: Episodes kept per group. A smaller group is kept whole.
    """

    def __init__(self, count: Annotated[int, Field(ge=1)] = 1):
        self.count = count

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        best_ids = {trajectory.id for trajectory in best_first(group)[: self.count]}
        return decide_each(group, lambda trajectory: None if trajectory.id in best_ids else NOT_AMONG_BEST)
