"""Applies a filter to trajectories, group by group."""

from __future__ import annotations

from collections.abc import Iterable

from components.errors import Problem, SpecError
from components.filters.protocol import KEPT, UNSCORED, Filter
from components.trajectories.groups import by_scenario
from components.trajectories.schema import Selection, Trajectory


def apply(filter_: Filter, trajectories: Iterable[Trajectory]) -> list[Selection]:
    """One Selection for each trajectory, in order. The trajectories carry their rewards.

    Raises SpecError where the filter does not decide about each trajectory of a group, in order, or keeps one that has
    no reward.
    """
    trajectories = list(trajectories)
    decisions: dict[str, Selection] = {}
    for scenario_id, group in by_scenario(trajectories).items():
        selections = filter_.select(group)
        expected = [trajectory.id for trajectory in group]
        if (found := [selection.trajectory_id for selection in selections]) != expected:
            raise _mistake(filter_, f"decided about {found} in scenario {scenario_id}, expected {expected}, in order")
        for trajectory, selection in zip(group, selections, strict=True):
            if selection.kept and trajectory.reward is None:
                raise _mistake(filter_, f"keeps {trajectory.id}, which has no reward")
            decisions[trajectory.id] = selection
    return [decisions[trajectory.id] for trajectory in trajectories]


def decide(trajectory: Trajectory, rule: str | None) -> Selection:
    """The decision about one trajectory: dropped as unscored, dropped by the named rule, or kept where it is None."""
    if trajectory.reward is None:
        return Selection(trajectory.id, False, UNSCORED)
    return Selection(trajectory.id, rule is None, rule or KEPT)


def _mistake(filter_: Filter, message: str) -> SpecError:
    return SpecError([Problem("filter", f"{type(filter_).__name__} {message}")])
