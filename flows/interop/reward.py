"""Reward of one episode, as `reward` of the configuration defines it.

The reward of training scores a whole episode, so its value belongs to the last step; the steps before have reward 0.
With `reward=returned` each step has the environment's own reward. In both cases the rewards of an episode sum to its
score.
"""

from __future__ import annotations

from typing import Any

from components.errors import JudgeError, Problem, SpecError
from components.rewards.judge import RewardCaller, reject_running_statistics
from components.rewards.protocol import ModelReward
from components.trajectories.schema import Trajectory


class EpisodeReward:
    """Scores finished episodes. Raises SpecError for a reward that needs a model or statistics of other episodes."""

    def __init__(self, reward: Any):
        self._caller = RewardCaller(reward)
        reject_running_statistics(reward, "reward")
        if isinstance(reward, ModelReward):
            message = (
                f"{type(reward).__name__} asks a model; expected a reward that is computed by rules, such as outcome"
            )
            raise SpecError([Problem("reward", message)])
        self.of_steps = bool(getattr(reward, "of_steps", False))
        """True if the rewards of the environment's steps are the rewards of the steps."""

    async def score(self, trajectory: Trajectory) -> float:
        """Return the score of an episode. Raises JudgeError if the reward cannot score it."""
        (score,) = await self._caller.call_group_async([trajectory])
        if score.reward is None:
            reason = score.failure.message if score.failure else "no reason given"
            raise JudgeError(f"reward: {trajectory.scenario.id} is unscored: {reason}")
        return score.reward
