"""What filters share: the decision about one trajectory, and the order from best to worst."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from components.filters.protocol import FAILED, KEPT, UNSCORED
from components.trajectories.schema import Selection, Trajectory


def decide(trajectory: Trajectory, rule: str | None) -> Selection:
    """The decision about one trajectory: dropped as failed or unscored, dropped by the named rule, or kept where it is
    None."""
    if trajectory.reward is None:
        return Selection(trajectory.id, False, FAILED if trajectory.failure is not None else UNSCORED)
    return Selection(trajectory.id, rule is None, rule or KEPT)


def decide_each(group: Sequence[Trajectory], rule: Callable[[Trajectory], str | None]) -> list[Selection]:
    """The decisions about a group; the rule is asked about scored trajectories only."""
    return [decide(one, rule(one) if one.reward is not None else None) for one in group]


def scored(group: Iterable[Trajectory]) -> list[tuple[float, Trajectory]]:
    """Rewards and trajectories of those that have one."""
    return [(one.reward, one) for one in group if one.reward is not None]


def best_first(group: Iterable[Trajectory]) -> list[Trajectory]:
    """The scored trajectories of a group by falling reward; equals in their order."""
    return [one for _, one in sorted(scored(group), key=lambda pair: -pair[0])]
