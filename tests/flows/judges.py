"""Judges with a known weakness, for calibration: each is as good or as bad as its docstring says."""

from __future__ import annotations

import random

from components.evaluation.calibration import written
from components.trajectories.schema import Score, Trajectory


def constant(trajectory: Trajectory) -> float:
    """Likes every episode as much."""
    return 0.5


def length(trajectory: Trajectory) -> float:
    """Likes whoever writes much, whatever comes of it."""
    return written(trajectory)


class Noisy:
    """Success and normal noise of this standard deviation, drawn anew for each seed."""

    def __init__(self, noise: float, seed: int = 0):
        self.noise, self.seed = noise, seed

    def __call__(self, trajectory: Trajectory) -> float:
        drawn = random.Random(f"{self.seed}-{trajectory.group}-{trajectory.id}").gauss(0.0, self.noise)
        return float(trajectory.success) + drawn


class First:
    """Success, and a half more for whoever is shown first of the group, less and less down to the last."""

    def score_group(self, group):
        last = max(len(group) - 1, 1)
        return [Score(one.id, float(one.success) + 0.5 * (1 - place / last)) for place, one in enumerate(group)]


class Shuffled(First):
    """The same, but it shows the group from the last to the first."""

    def places(self, group):
        return list(reversed(range(len(group))))

    def score_group(self, group):
        return list(reversed(super().score_group(group[::-1])))


class Priced:
    """Success, at a price that is known or not; odd samples it cannot score."""

    def __init__(self, cost: float | None):
        self.cost = cost

    def score_group(self, group):
        return [Score(one.id, float(one.success) if one.sample % 2 == 0 else None, cost=self.cost) for one in group]
