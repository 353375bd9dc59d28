"""Named costs beside a reward, for `algorithm.costs` to limit (safe RL).

A cost is what any reward says, shown under its name and added to nothing: the multipliers of the constrained algorithm
decide what it is worth (`components.algorithms.policy_gradient.cost_constraints`). It is positive where it should not
be.
"""

from __future__ import annotations

from typing import Any

from components.errors import Problem, SpecError
from components.rewards.composition.composed import ComposedPerEpisode, Parts, Value
from components.specs.registered import registered
from components.trajectories.schema import Trajectory


@registered("reward.costs")
class Costs(ComposedPerEpisode):
    """task: the reward. costs: rewards by name, whose numbers are the costs. Components: `task`, each cost under its
    name, and what they say below."""

    def __init__(self, task: Any, costs: dict[str, Any]):
        if not costs or "task" in costs or any("/" in name for name in costs):
            message = f"{sorted(costs)}: expected rewards by name, of which none is task or has a slash"
            raise SpecError([Problem("reward.costs", message)])
        super().__init__({"task": task, **costs})

    def value(self, trajectory: Trajectory, parts: Parts) -> Value:
        task = parts["task"]
        assert task.reward is not None
        return Value(task.reward, list(task.step_rewards))
