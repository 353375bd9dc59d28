"""Potential-based reward shaping, which preserves the optimal policy (Ng, Harada, Russell, ICML 1999):

    r'_t = r_t + γ Φ(s_(t+1)) - Φ(s_t)          with Φ = 0 after the last turn

so Σ_t γ^t r'_t = Σ_t γ^t r_t - Φ(s_0): the shaping terms cancel, and only the initial state makes a difference.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field

from components.errors import JudgeError, Problem, SpecError
from components.rewards.composition.composed import ComposedPerEpisode, CompositionResult, Parts
from components.rewards.judge import number
from components.rewards.user_functions import Function, build_function, is_async
from components.specs.registered import registered
from components.trajectories.schema import Trajectory


@registered("reward.potential")
class Potential(ComposedPerEpisode):
    """Potential-based shaping of a reward.

    Args:
        reward: Any reward, r. Without step rewards it counts at the last turn.
        function: (trajectory) -> Φ of the state before each turn: one number per turn.
        gamma: Discount factor γ, 0 to 1; equal to `algorithm.discount`, to preserve the optimal policy.

    The component `potential` is the sum of the shaping terms, Σ_t (γ Φ(s_(t+1)) - Φ(s_t)).
    """

    def __init__(
        self,
        reward: Any,
        function: Function,
        gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    ):
        super().__init__({"reward": reward})
        self.function = build_function(function)
        if is_async(self.function):
            raise SpecError([Problem("reward.function", "is async; expected a plain function of a trajectory")])
        self.gamma = gamma

    def value(self, trajectory: Trajectory, parts: Parts) -> CompositionResult:
        score = parts["reward"]
        assert score.reward is not None
        potentials = [number(value, "a potential") for value in self.function(trajectory)]
        if not potentials:
            raise JudgeError("the potential function returned nothing; expected a number for each turn")
        steps = score.step_rewards or [*[0.0] * (len(potentials) - 1), score.reward]
        if len(potentials) != len(steps):
            raise JudgeError(f"{len(potentials)} potentials for {len(steps)} step rewards; expected one for each")
        shaping = [self.gamma * after - before for before, after in pairwise([*potentials, 0.0])]
        shaped = [step + term for step, term in zip(steps, shaping, strict=True)]
        return CompositionResult(score.reward + sum(shaping), shaped, {"potential": sum(shaping)})
