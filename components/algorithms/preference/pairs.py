"""Pairs: two episodes of a scenario of which one is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from components.trajectories.groups import by_scenario, have_spread
from components.trajectories.schema import Trajectory

Which = Literal["best_worst", "all"]


def pairs(
    trajectories: Iterable[Trajectory], value: Callable[[Trajectory], float], which: Which, min_margin: float
) -> list[tuple[Trajectory, Trajectory]]:
    """(better, worse) by `value`, of each scenario: the best with the worst, or every two of which one is better. Those
    that differ by no more than `min_margin`, or by rounding only, are left out."""
    found = []
    for group in by_scenario(trajectories).values():
        ranked = sorted(group, key=lambda one: -value(one))  # stable: of equals, the first one
        couples = [(ranked[0], min(group, key=value))]
        if which == "all":
            couples = [(better, worse) for index, better in enumerate(ranked) for worse in ranked[index + 1 :]]
        for better, worse in couples:
            values = value(better), value(worse)
            if have_spread(values) and values[0] - values[1] > min_margin:
                found.append((better, worse))
    return found
