"""Keeps the best episodes of each scenario."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from components.filters.decisions import best_first, decide_each
from components.specs.registered import registered
from components.trajectories.schema import Selection, Trajectory

NOT_AMONG_BEST = "not_among_best"
"""Reason: enough episodes of the group have a higher reward, or the same and came earlier."""


@registered("filter.best")
class Best:
    """Keeps the episodes with the highest rewards of each group; of equal ones the first.

    Args:
        count: How many of each group; all of a group that has fewer.
    """

    def __init__(self, count: Annotated[int, Field(ge=1)] = 1):
        self.count = count

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        kept = {one.id for one in best_first(group)[: self.count]}
        return decide_each(group, lambda one: None if one.id in kept else NOT_AMONG_BEST)
