"""Filter protocol: selection of the trajectories to train on.

The short form is any function `(trajectory) -> bool`: True keeps. The full form decides about a whole group: a class
with a method `select`. A filter that needs the whole collection first has a method `survey` instead. It reads the
collection as often as it needs, one group at a time, and returns the filter that decides.

These forms see whole trajectories. A filter that needs only some columns, such as rewards, is a `ColumnFilter`: it
decides about batches of groups as arrays, and nothing else is read from the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from components.errors import Problem, SpecError
from components.trajectories.reads import NOTHING, Reads
from components.trajectories.schema import FAILED, UNSCORED, Selection, Trajectory

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns
    from components.trajectories.sources import Source

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


class ColumnFilter:
    """Filter that reads columns: the form of the built-in filters that need no whole trajectories."""

    reads: Reads = NOTHING
    """Columns that `rule_N` and `prepare` read, next to id, group, reward and failure."""

    def prepare(self, source: Source) -> ColumnFilter:
        """Return the filter that decides about this collection; self if it needs no knowledge of the collection."""
        return self

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        """Return the (N,) reasons for dropping, None for keeping. Decisions about unscored episodes are ignored.

        Raises SpecError if a subclass defines neither this method nor a `prepare` that returns another filter."""
        text = f"{type(self).__name__} does not define `rule_N`, which decides about the episodes of a batch"
        raise SpecError([Problem("filter", text)])

    def reasons_N(self, episodes: EpisodeColumns) -> Array:
        """Return the (N,) reasons for dropping, None for keeping: failed, unscored, or the reason of the rule."""
        from components.filters.reasons import dropped

        unscored_N = dropped(episodes.failed_N, FAILED, otherwise=UNSCORED)
        unscored_N[episodes.scored_N] = self.rule_N(episodes)[episodes.scored_N]
        return unscored_N

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        """Return the decisions about a group of trajectories in memory, as `Filter.select`."""
        from components.filters.reasons import as_selections
        from components.trajectories.sources import InMemory

        decider = self.prepare(InMemory(group))
        return [
            selection
            for episodes in InMemory(group).read(decider.reads)
            for selection in as_selections(episodes, decider.reasons_N(episodes))
        ]


AnyFilter = Predicate | Filter | CollectionFilter | ColumnFilter
"""Any form of a filter."""


def decides_per_group(filter_: object) -> bool:
    """Return True if the filter decides about each group by itself, so that a collection can be split between groups. A
    filter can declare it by an attribute `per_group`; without, those with `survey` do not."""
    return bool(getattr(filter_, "per_group", not isinstance(filter_, CollectionFilter)))
