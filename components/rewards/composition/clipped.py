"""Clipping of a reward: min(high, max(low, r)).

A policy trained on a learned reward exploits its errors; a bound limits what such an error can earn.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import FiniteFloat

from components.errors import Problem, SpecError
from components.rewards.composition.composed import (
    ComposedPerEpisode,
    CompositionResult,
    Parts,
    replace_reward,
    required_step_rewards,
)
from components.specs.registered import registered
from components.trajectories.schema import Trajectory


@registered("reward.clipped")
class Clipped(ComposedPerEpisode):
    """Upper bound, lower bound, or both.

    Args:
        reward: Any reward.
        low, high: Lower and upper bound; null is no bound.
        of: `reward` clips the reward of an episode, and the difference goes to the last step; `steps` clips each step
            reward, and the reward is their sum.
    """

    def __init__(
        self,
        reward: Any,
        low: FiniteFloat | None = None,
        high: FiniteFloat | None = None,
        of: Literal["reward", "steps"] = "reward",
    ):
        if low is None and high is None:
            raise SpecError([Problem("reward", "low and high are both null; expected a number for one of them")])
        if low is not None and high is not None and low > high:
            raise SpecError([Problem("reward.low", f"{low:g} is more than high={high:g}")])
        super().__init__({"reward": reward})
        self.low, self.high, self.of = low, high, of

    def value(self, trajectory: Trajectory, parts: Parts) -> CompositionResult:
        score = parts["reward"]
        assert score.reward is not None
        if self.of == "steps":
            steps = [self._clip(step) for step in required_step_rewards(score, "reward.of=steps")]
            return CompositionResult(sum(steps), steps)
        return replace_reward(score, self._clip(score.reward))

    def _clip(self, value: float) -> float:
        value = value if self.low is None else max(self.low, value)
        return value if self.high is None else min(self.high, value)
