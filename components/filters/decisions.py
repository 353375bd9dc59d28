"""Decisions about whole trajectories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from components.trajectories.schema import FAILED, KEPT, UNSCORED, Selection, Trajectory


def decide(trajectory: Trajectory, rule: str | None) -> Selection:
    """Return the decision about one trajectory: dropped as failed or unscored, dropped by the named rule, or kept if
    `rule` is None."""
    if trajectory.reward is None:
        return Selection(trajectory.id, False, FAILED if trajectory.failure is not None else UNSCORED)
    return Selection(trajectory.id, rule is None, rule or KEPT)


def decide_each(group: Sequence[Trajectory], rule: Callable[[Trajectory], str | None]) -> list[Selection]:
    """Return the decisions about a group. `rule` is called with scored trajectories only."""
    return [decide(trajectory, rule(trajectory) if trajectory.reward is not None else None) for trajectory in group]


def best_first(group: Iterable[Trajectory]) -> list[Trajectory]:
    """Return the scored trajectories in descending order of reward. The sort is stable."""
    scored = [(trajectory.reward, trajectory) for trajectory in group if trajectory.reward is not None]
    return [trajectory for _, trajectory in sorted(scored, key=lambda pair: -pair[0])]
