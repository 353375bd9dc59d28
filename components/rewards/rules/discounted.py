"""Discounted return of the step rewards: R = Σ_t γ^t r_t, with t from 0."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from components.rewards.composition.composed import ComposedPerEpisode, CompositionResult, Parts, required_step_rewards
from components.specs.registered import registered
from components.trajectories.schema import Trajectory


@registered("reward.discounted")
class Discounted(ComposedPerEpisode):
    """Discounted return of the step rewards.

    Args:
        reward: A reward that gives step rewards; `components.rewards.rules.returned.Returned` gives those of the
            environment.
        gamma: Discount factor γ, 0 to 1.

    Step rewards stay unchanged: `algorithm.credit=turns` discounts them itself. An episode without step rewards is
    unscored with that reason.
    """

    def __init__(self, reward: Any, gamma: Annotated[float, Field(ge=0, le=1)] = 0.99):
        super().__init__({"reward": reward})
        self.gamma = gamma

    def value(self, trajectory: Trajectory, parts: Parts) -> CompositionResult:
        steps = list(required_step_rewards(parts["reward"], "a discounted return"))
        return CompositionResult(sum(self.gamma**t * step for t, step in enumerate(steps)), steps)
