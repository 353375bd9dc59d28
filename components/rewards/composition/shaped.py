"""A reward through a function of its value: R = f(r)."""

from __future__ import annotations

import math
from typing import Any

from components.errors import Problem, SpecError
from components.rewards.composition.composed import ComposedPerEpisode, Parts, Value, replace_reward
from components.rewards.judge import number
from components.rewards.user_functions import Function, build_function, is_async
from components.specs.registered import registered
from components.trajectories.schema import Trajectory


@registered("reward.shaped")
class Shaped(ComposedPerEpisode):
    """reward: any reward. function: value -> value, as `my_package.shapes.squared`, or with arguments. What the
    function changes falls to the last step."""

    def __init__(self, reward: Any, function: Function):
        super().__init__({"reward": reward})
        self.function = build_function(function)
        if is_async(self.function):
            raise SpecError([Problem("reward.function", "is async; expected a plain function of a number")])

    def value(self, trajectory: Trajectory, parts: Parts) -> Value:
        return replace_reward(
            parts["reward"], number(self.function(parts["reward"].reward), "what the function returned")
        )


@registered("reward.tanh")
def tanh(value: float, scale: float = 1.0) -> float:
    """tanh(value / scale): within -1 and 1, and nearly the value itself where that is small beside `scale`."""
    return math.tanh(value / scale)


@registered("reward.signed_log")
def signed_log(value: float) -> float:
    """sign(value) · log(1 + |value|): large rewards of either sign brought near."""
    return math.copysign(math.log1p(abs(value)), value)
