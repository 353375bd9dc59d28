"""Reward of the environment or agent: the outcome's `reward`, or else the sum of the step rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from components.specs.registered import registered
from components.trajectories.schema import Failure, Score, Trajectory


@registered("reward.returned")
class Returned:
    """Reward reported by the environment. An episode without `reward` and step rewards is unscored with that reason."""

    of_steps = True
    """The reward of an episode is the sum of the rewards of its steps."""

    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return one score for each trajectory."""
        return [_score(trajectory) for trajectory in group]


def _score(trajectory: Trajectory) -> Score:
    reward: Any = trajectory.outcome.get("reward", sum(trajectory.step_rewards) if trajectory.step_rewards else None)
    if isinstance(reward, Real) and math.isfinite(float(reward)):
        return Score(trajectory.id, float(reward), {"returned": float(reward)}, list(trajectory.step_rewards))
    reason = f"neither outcome['reward'] nor step rewards: found {reward!r:.100}"
    return Score(trajectory.id, None, failure=Failure("judge", "JudgeError", reason))
