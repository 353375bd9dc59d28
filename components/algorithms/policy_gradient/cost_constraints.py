"""Rewards under constraints: as much reward as can be had while mean costs stay below their limits.

    maximise E[r] subject to E[c_i] <= d_i   is   min over λ >= 0 of max over policies of E[r] - Σ λ_i (E[c_i] - d_i)

    λ_i <- max(0, λ_i + learning_rate_i (mean of c_i - d_i))      dual ascent, once a round, before the policy learns
    r'  =  (min(r, reward_cap) - Σ λ_i c_i) / (1 + Σ λ_i)         what the policy then learns from

as PPO-Lagrangian does it (Ray, Achiam, Amodei, "Benchmarking Safe Exploration in Deep RL", 2019; arXiv:1805.11074).
The division, which `cost_scaling` turns off, keeps r' in the range of rewards and costs, however large a multiplier
grows.

A cost is a metric of the episode, or where it has none of that name, a component of the judge's score
(`trajectories.store.read_scored`), or a number among what the environment said of its outcome. The mean is over all
scored episodes of the round, whatever the filter has left of them; multipliers are a part of the checkpoint. They
follow from the checkpoint before and the round's episodes, so a training that is killed finds the same ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from components.algorithms.continual.replay import ROUNDS_AGO
from components.algorithms.spec import CostSpec, PolicyGradientSpec
from components.errors import ArtifactError
from components.json_text import read_json
from components.trajectories.schema import Trajectory

FILE = "multipliers.json"
"""In a checkpoint: λ by name."""

Multipliers = dict[str, float]


def mean_costs(costs: Mapping[str, CostSpec], trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Mean of each cost over the scored episodes of this round; empty where there are none. Raises ArtifactError where
    one has no such cost."""
    found = [[_cost(one, name) for name in costs] for one in trajectories if _counts(one) and not _replayed(one)]
    return {name: math.fsum(column) / len(found) for name, column in zip(costs, zip(*found, strict=True), strict=False)}


def ascend(multipliers: Multipliers, costs: Mapping[str, CostSpec], means: Mapping[str, float]) -> Multipliers:
    """One step of dual ascent; a cost that was not measured keeps its multiplier."""
    return {
        name: max(0.0, value + costs[name].learning_rate * (means[name] - costs[name].limit))
        if name in means
        else value
        for name, value in multipliers.items()
    }


def penalised(
    spec: PolicyGradientSpec, trajectories: Sequence[Trajectory], multipliers: Multipliers
) -> list[Trajectory]:
    """The trajectories with r' for their reward; with `credit: turns`, step rewards divided alike, and the costs off
    the last. Raises ArtifactError where one has no such cost."""
    divisor = 1 + math.fsum(multipliers.values()) if spec.cost_scaling else 1.0
    found = []
    for one in trajectories:
        if not _counts(one):
            found.append(one)
            continue
        assert one.reward is not None
        cap = math.inf if spec.reward_cap is None else spec.reward_cap
        penalty = math.fsum(value * _cost(one, name) for name, value in multipliers.items())
        steps = [*one.step_rewards[:-1], *(last - penalty for last in one.step_rewards[-1:])]
        reward = (min(one.reward, cap) - penalty) / divisor
        found.append(replace(one, reward=reward, step_rewards=[step / divisor for step in steps]))
    return found


def constrained(
    spec: PolicyGradientSpec, trajectories: Sequence[Trajectory], start: Path | None, means: Mapping[str, float] | None
) -> tuple[list[Trajectory], Multipliers, dict[str, float]]:
    """What a training learns from, its multipliers, and figures of both. start: the checkpoint before. means: of the
    policy's costs; None takes those of the trajectories."""
    costs = spec.costs or {}
    if means is None:
        means = mean_costs(costs, trajectories)
    multipliers = ascend(load(start, costs), costs, means)
    figures = {f"cost/{name}": value for name, value in means.items()}
    figures |= {f"multiplier/{name}": value for name, value in multipliers.items()}
    return penalised(spec, trajectories, multipliers), multipliers, figures


def load(checkpoint: Path | None, costs: Mapping[str, CostSpec]) -> Multipliers:
    """The multipliers of a checkpoint; those that it does not have begin with `initial`."""
    file = checkpoint / FILE if checkpoint is not None else None
    saved = read_json(file) if file is not None and file.is_file() else {}
    return {name: float(saved.get(name, cost.initial)) for name, cost in costs.items()}


def save(checkpoint: Path, multipliers: Multipliers) -> None:
    """Writes them beside the adapter; nothing where there are none."""
    if multipliers:
        (checkpoint / FILE).write_text(json.dumps(multipliers, indent=1, sort_keys=True) + "\n")


def _counts(one: Trajectory) -> bool:
    return one.reward is not None and one.failure is None


def _replayed(one: Trajectory) -> bool:
    return one.metrics.get(ROUNDS_AGO, 0) > 0


def _cost(one: Trajectory, name: str) -> float:
    outcome = {key: float(value) for key, value in one.outcome.items() if isinstance(value, int | float)}
    known = {**outcome, **one.metrics}
    value = known.get(name)
    if value is None or not math.isfinite(value):
        what = "has no cost of this name" if value is None else f"has a cost of {value}"
        raise ArtifactError(
            f"algorithm.costs.{name}: trajectory {one.id} {what}; expected a metric of the episode, a component of its "
            f"score or a number of its outcome. It has {', '.join(sorted(known)) or 'none'}"
        )
    return value
