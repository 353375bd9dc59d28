"""Constrained rewards: maximise the reward while mean costs stay below their limits.

    maximise E[r] subject to E[c_i] <= d_i   is   min over λ >= 0 of max over policies of E[r] - Σ λ_i (E[c_i] - d_i)

    λ_i <- max(0, λ_i + learning_rate_i (mean of c_i - d_i))      dual ascent, once per round, before the policy learns
    r'  =  (min(r, reward_cap) - Σ λ_i c_i) / (1 + Σ λ_i)         reward that the policy learns from

as in PPO-Lagrangian (Ray, Achiam, Amodei, "Benchmarking Safe Exploration in Deep RL", 2019; arXiv:1805.11074). The
division, which `cost_scaling` disables, keeps r' in the range of rewards and costs, however large a multiplier grows.

A cost is a metric of the episode, a component of the judge's score if no metric has that name
(`trajectories.store.read_scored`), or a number of the environment's outcome. The mean is over all scored episodes of
the round, including those that the filter drops. Multipliers are part of the checkpoint. They follow from the previous
checkpoint and the round's episodes, so a resumed training computes the same multipliers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.algorithms.continual.replay import ROUNDS_AGO
from components.algorithms.trainer import Trainer, TrainingContext, TrainingResult
from components.errors import ArtifactError
from components.json_text import read_json
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.policy_gradient.spec import PolicyGradientSpec
    from components.algorithms.spec import CostSpec

FILE = "multipliers.json"
"""File of a checkpoint with λ by name."""

Multipliers = dict[str, float]


def mean_costs(costs: Mapping[str, CostSpec], trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Return the mean of each cost over the scored episodes of this round; empty if there are none. Raises
    ArtifactError if an episode lacks a cost."""
    rows = [
        [_cost(trajectory, name) for name in costs]
        for trajectory in trajectories
        if _counts(trajectory) and not _replayed(trajectory)
    ]
    return {name: math.fsum(column) / len(rows) for name, column in zip(costs, zip(*rows, strict=True), strict=False)}


def update_multipliers(
    multipliers: Multipliers, costs: Mapping[str, CostSpec], means: Mapping[str, float]
) -> Multipliers:
    """Return the multipliers after one step of dual ascent. A cost without a measured mean keeps its multiplier."""
    return {
        name: max(0.0, value + costs[name].learning_rate * (means[name] - costs[name].limit))
        if name in means
        else value
        for name, value in multipliers.items()
    }


def subtract_costs(
    spec: PolicyGradientSpec, trajectories: Sequence[Trajectory], multipliers: Multipliers
) -> list[Trajectory]:
    """Return copies of the trajectories with r' as their reward. With `credit: turns`, step rewards are divided by the
    same factor and the costs are subtracted from the last one. Raises ArtifactError if an episode lacks a cost."""
    divisor = 1 + math.fsum(multipliers.values()) if spec.cost_scaling else 1.0
    result = []
    for trajectory in trajectories:
        if not _counts(trajectory):
            result.append(trajectory)
            continue
        assert trajectory.reward is not None
        cap = math.inf if spec.reward_cap is None else spec.reward_cap
        penalty = math.fsum(value * _cost(trajectory, name) for name, value in multipliers.items())
        steps = [*trajectory.step_rewards[:-1], *(last - penalty for last in trajectory.step_rewards[-1:])]
        changed = copy(trajectory)
        changed.reward = (min(trajectory.reward, cap) - penalty) / divisor
        changed.step_rewards = [step / divisor for step in steps]
        result.append(changed)
    return result


def constrained(
    spec: PolicyGradientSpec, context: TrainingContext
) -> tuple[TrainingContext, Multipliers, dict[str, float]]:
    """Return the context with the constrained rewards, the multipliers of this round, and their metrics."""
    if not spec.costs and spec.reward_cap is None:
        return context, {}, {}
    means = context.mean_costs
    if means is None:
        means = mean_costs(spec.constraints, context.trajectories)
    multipliers = update_multipliers(load(context.start, spec.constraints), spec.constraints, means)
    metrics = {f"cost/{name}": mean for name, mean in means.items()}
    metrics |= {f"multiplier/{name}": value for name, value in multipliers.items()}
    trajectories = subtract_costs(spec, context.trajectories, multipliers)
    return replace(context, trajectories=trajectories), multipliers, metrics


class ConstrainedTrainer(Trainer):
    """Trainer whose algorithm learns from rewards minus their costs, and which updates the multipliers.

    learn: trains on the trajectories of a context.
    """

    def __init__(
        self, spec: PolicyGradientSpec, context: TrainingContext, learn: Callable[[TrainingContext], TrainingResult]
    ):
        self._learn = learn
        self._context, self._multipliers, self._metrics = constrained(spec, context)

    def train(self) -> TrainingResult:
        step, metrics = self._learn(self._context)
        return step, metrics | self._metrics

    def save(self, folder: Path) -> None:
        """Write the multipliers, if there are any."""
        if self._multipliers:
            (folder / FILE).write_text(json.dumps(self._multipliers, indent=1, sort_keys=True) + "\n")


def load(checkpoint: Path | None, costs: Mapping[str, CostSpec]) -> Multipliers:
    """Return the multipliers of a checkpoint. Multipliers that the checkpoint lacks start at `initial`."""
    file = checkpoint / FILE if checkpoint is not None else None
    saved = read_json(file) if file is not None and file.is_file() else {}
    return {name: float(saved.get(name, cost.initial)) for name, cost in costs.items()}


def numbers_of(trajectory: Trajectory) -> dict[str, float]:
    """Return the numbers of an episode that can be costs, by name: those of its outcome, and its metrics."""
    outcome = {key: float(value) for key, value in trajectory.outcome.items() if isinstance(value, int | float)}
    return {**outcome, **trajectory.metrics}


def _counts(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None and trajectory.failure is None


def _replayed(trajectory: Trajectory) -> bool:
    return trajectory.metrics.get(ROUNDS_AGO, 0) > 0


def _cost(trajectory: Trajectory, name: str) -> float:
    costs = numbers_of(trajectory)
    value = costs.get(name, 0.0 if name == "reasoning_tokens" else None)  # no metric of an episode without reasoning
    if value is None or not math.isfinite(value):
        problem = "has no cost of this name" if value is None else f"has a cost of {value}"
        raise ArtifactError(
            f"algorithm.costs.{name}: trajectory {trajectory.id} {problem}; expected a metric of the episode, a "
            f"component of its score or a number of its outcome. It has {', '.join(sorted(costs)) or 'none'}"
        )
    return value
