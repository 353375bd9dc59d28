"""The filter protocol: which trajectories of a group are trained on.

The short form is any function `(trajectory) -> bool`: True keeps. The full form decides about a whole group: a class
with a method `select`. A filter that has to see the whole collection first has a method `survey` in its place, which
reads it as often as it needs to, a group at a time, and returns the filter that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from components.trajectories.schema import Selection, Trajectory

KEPT = "kept"
"""Reason of every selection that keeps, and of none that drops."""
FAILED = "failed"
"""Reason of every selection that drops an episode which did not run to its end. All filters here drop them."""
UNSCORED = "unscored"
"""Reason of every selection that drops a finished one without a reward. All filters here drop them."""

Groups = Callable[[], Iterator[Sequence[Trajectory]]]
"""The collection from its beginning, each time that it is called: the trajectories of one scenario after the other."""


class Predicate(Protocol):
    def __call__(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory that has a reward is kept."""
        ...


@runtime_checkable
class Filter(Protocol):
    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        """One decision for each trajectory of one scenario, in the same order; the same whenever it is asked. Rewards
        are joined on, and the components of scores are among the metrics."""
        ...


@runtime_checkable
class CollectionFilter(Protocol):
    def survey(self, groups: Groups) -> Filter:
        """The filter that decides about this collection. What it keeps of a trajectory should be small."""
        ...


AnyFilter = Predicate | Filter | CollectionFilter
