"""Named costs besides a reward, which `algorithm.costs` constrains (safe RL).

A cost is the value of any reward, recorded under its name and not added to the reward: the multipliers of the
constrained algorithm determine its weight (`components.algorithms.policy_gradient.cost_constraints`). It is positive
for unwanted behaviour.
"""

from __future__ import annotations

from typing import Any

from components.errors import Problem, SpecError
from components.rewards.composition.composed import ComposedPerEpisode, CompositionResult, Parts
from components.specs.registered import registered
from components.trajectories.schema import Trajectory


@registered("reward.costs")
class Costs(ComposedPerEpisode):
    """Reward with named costs.

    Args:
        task: The reward.
        costs: Rewards by name, whose values are the costs.

    The components of a Score are `task`, each cost under its name, and their own components below.
    """

    def __init__(self, task: Any, costs: dict[str, Any]):
        if not costs or "task" in costs or any("/" in name for name in costs):
            message = f"{sorted(costs)}: expected rewards by name, of which none is task or has a slash"
            raise SpecError([Problem("reward.costs", message)])
        super().__init__({"task": task, **costs})

    def value(self, trajectory: Trajectory, parts: Parts) -> CompositionResult:
        task = parts["task"]
        assert task.reward is not None
        return CompositionResult(task.reward, list(task.step_rewards))
