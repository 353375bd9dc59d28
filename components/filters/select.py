"""Applies a filter to trajectories, group by group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from components.errors import Problem, SpecError
from components.filters.protocol import KEPT, UNSCORED, Filter
from components.trajectories.groups import adjacent_groups
from components.trajectories.schema import Selection, Trajectory


def apply(filter_: Filter, trajectories: Iterable[Trajectory]) -> Iterator[Selection]:
    """One Selection for each trajectory, in order, with one group in memory at a time. The trajectories carry their
    rewards, and those of a scenario lie next to each other.

    Raises SpecError where the filter does not decide about each trajectory of a group, in order, or keeps one that has
    no reward; ArtifactError where a scenario comes back.
    """
    for group in adjacent_groups(trajectories):
        selections = filter_.select(group)
        expected = [trajectory.id for trajectory in group]
        if (found := [selection.trajectory_id for selection in selections]) != expected:
            name = group[0].group
            raise _mistake(filter_, f"decided about {found} in scenario {name}, expected {expected}, in order")
        for trajectory, selection in zip(group, selections, strict=True):
            if selection.kept and trajectory.reward is None:
                raise _mistake(filter_, f"keeps {trajectory.id}, which has no reward")
        yield from selections


def decide(trajectory: Trajectory, rule: str | None) -> Selection:
    """The decision about one trajectory: dropped as unscored, dropped by the named rule, or kept where it is None."""
    if trajectory.reward is None:
        return Selection(trajectory.id, False, UNSCORED)
    return Selection(trajectory.id, rule is None, rule or KEPT)


def _mistake(filter_: Filter, message: str) -> SpecError:
    return SpecError([Problem("filter", f"{type(filter_).__name__} {message}")])
