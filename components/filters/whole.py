"""Filters of whole trajectories, such as a user's own, in the form of a filter that decides about batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from components.errors import Problem, SpecError
from components.filters.protocol import CollectionFilter, ColumnFilter, Filter
from components.filters.reason_names import KEPT
from components.trajectories.reads import WHOLE
from components.trajectories.schema import Selection, Trajectory

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns
    from components.trajectories.sources import Source


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
