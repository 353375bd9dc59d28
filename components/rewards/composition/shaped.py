"""Reward transformed by a function of its value: R = f(r)."""

from __future__ import annotations

import math
from typing import Any

from components.errors import Problem, SpecError
from components.rewards.composition.composed import ComposedPerEpisode, CompositionResult, Parts, replace_reward
from components.rewards.judge import number
from components.rewards.user_functions import Function, build_function, is_async
from components.specs.registered import registered
from components.trajectories.schema import Trajectory


@registered("reward.shaped")
class Shaped(ComposedPerEpisode):
    """Reward transformed by a function.

    Args:
        reward: Any reward.
        function: value -> value, as `my_package.shapes.squared`, or with arguments. The change goes to the last step.
    """

    def __init__(self, reward: Any, function: Function):
        super().__init__({"reward": reward})
        self.function = build_function(function)
        if is_async(self.function):
            raise SpecError([Problem("reward.function", "is async; expected a plain function of a number")])

    def value(self, trajectory: Trajectory, parts: Parts) -> CompositionResult:
        return replace_reward(
            parts["reward"], number(self.function(parts["reward"].reward), "what the function returned")
        )


@registered("reward.tanh")
def tanh(value: float, scale: float = 1.0) -> float:
    """Return tanh(value / scale): between -1 and 1, and close to value / scale if |value| is small compared to
    `scale`."""
    return math.tanh(value / scale)


@registered("reward.signed_log")
def signed_log(value: float) -> float:
    """Return sign(value) · log(1 + |value|), which compresses large rewards of either sign."""
    return math.copysign(math.log1p(abs(value)), value)
