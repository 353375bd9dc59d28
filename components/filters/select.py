"""Application of a filter to trajectories, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from components.errors import Problem, SpecError
from components.filters.protocol import KEPT, AnyFilter, CollectionFilter, Filter, Groups
from components.filters.user_function import UserFunction
from components.trajectories.groups import adjacent_groups
from components.trajectories.schema import Selection, Trajectory


def apply(filter_: AnyFilter, read: Callable[[], Iterable[Trajectory]]) -> Iterator[tuple[Trajectory, Selection]]:
    """Yield each trajectory with the decision about it, in order, with one group in memory at a time.

    read: returns the trajectories from the first one on. It is called once, and once more for each pass of a survey.
    Trajectories carry their rewards, and those of a scenario are adjacent.

    Raises SpecError if `filter_` is not a filter, does not decide about each trajectory of a group in order, keeps a
    trajectory without a reward, or drops one without a reason. Raises ArtifactError if the trajectories of a scenario
    are not adjacent.
    """

    def groups() -> Iterator[list[Trajectory]]:
        return adjacent_groups(read())

    decider = decider_of(filter_, groups)
    for group in groups():
        yield from zip(group, decisions(decider, group), strict=True)


def decider_of(filter_: Any, groups: Groups) -> Filter:
    """Return the filter that decides about this collection. Raise SpecError if `filter_` is not a filter."""
    if isinstance(filter_, CollectionFilter):
        return filter_.survey(groups)
    if isinstance(filter_, Filter):
        return filter_
    if callable(filter_):
        return UserFunction(filter_)
    message = (
        f"{type(filter_).__name__} is not a filter: expected a function (trajectory) -> bool, "
        "or an object with a method `select` or `survey`"
    )
    raise SpecError([Problem("filter", message)])


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
