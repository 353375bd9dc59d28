"""Specs of replay and of elastic weight consolidation."""

from __future__ import annotations

from pydantic import Field

from components.specs import Spec


class ReplaySpec(Spec):
    """Replay of groups of earlier rounds."""

    share: float = Field(0.25, ge=0, lt=1)
    """Share of a training's groups that come from earlier rounds, if there are enough of them."""
    rounds: int = Field(2, ge=1)
    """Number of earlier rounds that groups are drawn from."""
    max_staleness: int | None = Field(None, ge=0)
    """Largest number of policy versions between the policy that sampled a trajectory and the policy in training. Older
    trajectories are dropped. null sets no limit."""


class EWCSpec(Spec):
    """Elastic weight consolidation: a penalty on changes of the weights that mattered to the policy before the first
    round (arXiv:1612.00796)."""

    coefficient: float = Field(1.0, gt=0)
    """Weight of the penalty."""
    trajectories: int = Field(64, ge=1)
    """Largest number of trajectories for the Fisher information; each takes one backward pass."""
    rounds: int = Field(1, ge=1)
    """Number of last rounds that the trajectories come from: of the other run for a fork, of the task before with
    flow=continual. Otherwise they come from the warmup."""
