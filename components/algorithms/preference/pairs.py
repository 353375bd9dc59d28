"""Preference pairs: two episodes of a scenario with different values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from components.trajectories.groups import by_scenario, have_spread
from components.trajectories.schema import Trajectory

PairSelection = Literal["best_worst", "all"]


def pairs(
    trajectories: Iterable[Trajectory], value: Callable[[Trajectory], float], which: PairSelection, min_margin: float
) -> list[tuple[Trajectory, Trajectory]]:
    """Return the (better, worse) pairs of each scenario by `value`: the best with the worst episode, or every two
    episodes with different values. Pairs that differ by at most `min_margin`, or only by rounding, are left out."""
    result = []
    for group in by_scenario(trajectories).values():
        ranked = sorted(group, key=lambda trajectory: -value(trajectory))  # stable: among equals, the first comes first
        candidates = [(ranked[0], min(group, key=value))]
        if which == "all":
            candidates = [(better, worse) for index, better in enumerate(ranked) for worse in ranked[index + 1 :]]
        for better, worse in candidates:
            values = value(better), value(worse)
            if have_spread(values) and values[0] - values[1] > min_margin:
                result.append((better, worse))
    return result
