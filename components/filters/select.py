"""Applies a filter to trajectories, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from components.errors import Problem, SpecError
from components.filters.protocol import KEPT, AnyFilter, CollectionFilter, Filter, Groups
from components.filters.user_function import Own
from components.trajectories.groups import adjacent_groups
from components.trajectories.schema import Selection, Trajectory


def apply(filter_: AnyFilter, read: Callable[[], Iterable[Trajectory]]) -> Iterator[tuple[Trajectory, Selection]]:
    """Each trajectory with the decision about it, in order, with one group in memory at a time.

    read: the trajectories from the first one on, each time that it is called: once, and once more for each time that
    the filter surveys them. They carry their rewards, and those of a scenario lie next to each other.

    Raises SpecError where the filter is none, does not decide about each trajectory of a group, in order, keeps one
    that has no reward, or drops one for no reason; ArtifactError where a scenario comes back.
    """

    def groups() -> Iterator[list[Trajectory]]:
        return adjacent_groups(read())

    decider = decider_of(filter_, groups)
    for group in groups():
        yield from zip(group, decisions(decider, group), strict=True)


def decider_of(filter_: Any, groups: Groups) -> Filter:
    """The filter that decides about this collection. Raises SpecError where it is no filter."""
    if isinstance(filter_, CollectionFilter):
        return filter_.survey(groups)
    if isinstance(filter_, Filter):
        return filter_
    if callable(filter_):
        return Own(filter_)
    message = f"{type(filter_).__name__} is no filter: expected a function (trajectory) -> bool, `select` or `survey`"
    raise SpecError([Problem("filter", message)])


def decisions(decider: Filter, group: Sequence[Trajectory]) -> list[Selection]:
    """What the filter decides about a group. Raises SpecError where it breaks its protocol."""
    selections = decider.select(group)
    expected = [trajectory.id for trajectory in group]
    if (found := [selection.trajectory_id for selection in selections]) != expected:
        raise _mistake(decider, f"decided about {found} in scenario {group[0].group}, expected {expected}, in order")
    for trajectory, selection in zip(group, selections, strict=True):
        if selection.kept and trajectory.reward is None:
            raise _mistake(decider, f"keeps {trajectory.id}, which has no reward")
        if selection.kept != (selection.reason == KEPT) or not selection.reason:
            does, said = "keeps" if selection.kept else "drops", selection.reason
            expected_reason = repr(KEPT) if selection.kept else f"the name of a rule, and not {KEPT!r}"
            raise _mistake(decider, f"{does} {trajectory.id} for the reason {said!r}; expected {expected_reason}")
    return selections


def _mistake(filter_: Filter, message: str) -> SpecError:
    return SpecError([Problem("filter", f"{type(filter_).__name__} {message}")])
