"""Application of a filter to a collection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from components.errors import Problem, SpecError
from components.filters.protocol import CollectionFilter, ColumnFilter, Filter
from components.filters.user_function import UserFunction
from components.filters.whole import WholeTrajectories

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns
    from components.trajectories.sources import Source


def apply(filter_: Any, source: Source) -> Iterator[tuple[EpisodeColumns, Array]]:
    """Yield the collection in batches of whole groups, each with the (N,) reasons for dropping; None keeps.

    source: read once, and once more for each pass of a filter that needs the whole collection first. Only the columns
    that the filter reads are read.

    Raises SpecError if `filter_` is not a filter, does not decide about each trajectory of a group in order, keeps a
    trajectory without a reward, or drops one without a reason. Raises ArtifactError if the trajectories of a scenario
    are not adjacent.
    """
    decider = as_column_filter(filter_).prepare(source)
    for episodes in source.read(decider.reads):
        yield episodes, decider.reasons_N(episodes)


def as_column_filter(filter_: Any) -> ColumnFilter:
    """Return a filter as one that decides about batches. Raise SpecError if `filter_` is not a filter."""
    if isinstance(filter_, ColumnFilter):
        return filter_
    if isinstance(filter_, CollectionFilter | Filter):
        return WholeTrajectories(filter_)
    if callable(filter_):
        return WholeTrajectories(UserFunction(filter_))
    message = (
        f"{type(filter_).__name__} is not a filter: expected a function (trajectory) -> bool, "
        "or an object with a method `select` or `survey`"
    )
    raise SpecError([Problem("filter", message)])
