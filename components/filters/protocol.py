"""Filter protocol: selection of the trajectories to train on.

The short form is any function `(trajectory) -> bool`: True keeps. The full form decides about a whole group: a class
with a method `select`. A filter that needs the whole collection first has a method `survey` instead. It reads the
collection as often as it needs, one group at a time, and returns the filter that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from components.trajectories.schema import Selection, Trajectory

KEPT = "kept"
"""Reason of every selection that keeps its trajectory, and of no other."""
FAILED = "failed"
"""Reason of every selection that drops a failed episode. All filters here drop failed episodes."""
UNSCORED = "unscored"
"""Reason of every selection that drops a finished episode without a reward. All filters here drop such episodes."""

Groups = Callable[[], Iterator[Sequence[Trajectory]]]
"""Function that iterates over the collection from its start, one group (the trajectories of a scenario) at a time."""


class Predicate(Protocol):
    def __call__(self, trajectory: Trajectory) -> bool:
        """Return True to keep the trajectory, which has a reward."""
        ...


@runtime_checkable
class Filter(Protocol):
    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        """Return one decision for each trajectory of one scenario, in the same order. The result is deterministic.

        Trajectories carry their rewards, and score components are among their metrics.
        """
        ...


@runtime_checkable
class CollectionFilter(Protocol):
    def survey(self, groups: Groups) -> Filter:
        """Return the filter that decides about this collection. It should store little data per trajectory."""
        ...


AnyFilter = Predicate | Filter | CollectionFilter
"""Any form of a filter."""


def decides_per_group(filter_: object) -> bool:
    """Return True if the filter decides about each group by itself, so that a collection can be split between groups. A
    filter with `survey` can declare it by an attribute `per_group`."""
    return bool(getattr(filter_, "per_group", not isinstance(filter_, CollectionFilter)))
