"""Application of a filter to a collection: also of a user's function `(trajectory) -> bool`, and of filters of whole
trajectories, in the form of a filter that decides about batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from components.errors import Problem, SpecError
from components.exceptions import described, log_traceback
from components.filters.decisions import decide_each
from components.filters.protocol import CollectionFilter, ColumnFilter, Filter
from components.trajectories.reads import WHOLE
from components.trajectories.schema import KEPT, Selection, Trajectory

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


class UserFunction:
    """Filter that calls a user's function with each scored trajectory. The function's name is the reason for a drop.

    An exception or a result that is not a bool raises SpecError: continuing would train on a different selection than
    configured.
    """

    def __init__(self, function: Callable[[Trajectory], Any]):
        plain = function.func if isinstance(function, functools.partial) else function
        self.function = function
        self.name = getattr(plain, "__name__", type(plain).__name__)

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return decide_each(group, lambda trajectory: None if self._keeps(trajectory) else self.name)

    def _keeps(self, trajectory: Trajectory) -> bool:
        try:
            answer = self.function(trajectory)
        except (Exception, SystemExit) as error:  # user code may raise anything
            log_traceback(error)
            raise self._function_error(trajectory, f"raised {described(error)}") from error
        if type(answer).__name__ not in ("bool", "bool_"):  # bool_ and bool are numpy's
            raise self._function_error(
                trajectory, f"returned {answer!r:.80} ({type(answer).__name__}), expected True or False"
            )
        return bool(answer)

    def _function_error(self, trajectory: Trajectory, mistake: str) -> SpecError:
        return SpecError([Problem("filter", f"{self.name} {mistake}, for trajectory {trajectory.id}")])


class WholeTrajectories(ColumnFilter):
    """Filter that passes each group of trajectories to a filter, and checks its decisions."""

    reads = frozenset({WHOLE})

    def __init__(self, filter_: Filter | CollectionFilter):
        self.filter = filter_

    def prepare(self, source: Source) -> ColumnFilter:
        if not isinstance(self.filter, CollectionFilter):
            return self

        def groups() -> Iterator[list[Trajectory]]:
            for episodes in source.read(self.reads):
                yield from episodes.trajectory_groups()

        decider = self.filter.survey(groups)
        return decider if isinstance(decider, ColumnFilter) else WholeTrajectories(decider)

    def reasons_N(self, episodes: EpisodeColumns) -> Array:
        import numpy as np

        assert isinstance(self.filter, Filter)
        selections = [
            selection for group in episodes.trajectory_groups() for selection in decisions(self.filter, group)
        ]
        return np.array([None if selection.kept else selection.reason for selection in selections], object)


def decisions(decider: Filter, group: Sequence[Trajectory]) -> list[Selection]:
    """Return the filter's decisions about a group. Raise SpecError if they violate the filter protocol."""
    selections = decider.select(group)
    expected = [trajectory.id for trajectory in group]
    if (ids := [selection.trajectory_id for selection in selections]) != expected:
        raise _protocol_error(
            decider, f"decided about {ids} in scenario {group[0].group}, expected {expected}, in order"
        )
    for trajectory, selection in zip(group, selections, strict=True):
        if selection.kept and trajectory.reward is None:
            raise _protocol_error(decider, f"keeps {trajectory.id}, which has no reward")
        if selection.kept != (selection.reason == KEPT) or not selection.reason:
            verb, reason = "keeps" if selection.kept else "drops", selection.reason
            expected_reason = repr(KEPT) if selection.kept else f"the name of a rule, and not {KEPT!r}"
            raise _protocol_error(
                decider, f"{verb} {trajectory.id} for the reason {reason!r}; expected {expected_reason}"
            )
    return selections


def _protocol_error(filter_: Filter, message: str) -> SpecError:
    return SpecError([Problem("filter", f"{type(filter_).__name__} {message}")])
