"""Requests of trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.compute.spec import Strategy
from components.models.spec import ModelSpec
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.continual.ewc import Anchor
    from components.algorithms.reward_models.examples import JudgedCollection


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """Inputs and outputs that all trainings have. In distributed training (`loop.distributed`) all processes get the
    same request, including folders."""

    model: ModelSpec
    base_dir: Path
    """Local folder of the base model."""
    out: Path
    """Folder of the new checkpoint."""
    scratch: Path
    """Folder for the files of an unfinished training, from which the next run with the same folder continues."""
    seed: int
    on_step: Callable[[dict[str, float]], None]
    """Function that is called after each gradient step with its metrics, and at the start for the steps that an
    interrupted run with the same `scratch` took; in distributed training in all processes."""
    on_total: Callable[[int], None] = lambda total: None
    """Function that receives the number of gradient steps, including those of an interrupted run, before the first one
    of this run."""
    start: Path | None = None
    """Checkpoint to train from; None: the base model."""
    save_every: float = 30.0
    """Seconds between two saves of the unfinished training to `scratch`."""
    strategy: Strategy = "ddp"
    """Tensors that are sharded over the processes."""


@dataclass(frozen=True, kw_only=True)
class PolicyTrainingRequest(TrainingRequest):
    """Training of a policy on scored trajectories."""

    trajectories: Sequence[Trajectory]
    reference: Path | None = None
    """Checkpoint of the reference policy; None: the base model."""
    warm: dict[str, Any] | None = None
    """Cache of loaded models for the next training. The result is the same with an empty cache."""
    teacher_dir: Path | None = None
    """Local folder of the base model of `AlgorithmSpec.teacher_model`."""
    mean_costs: Mapping[str, float] | None = None
    """Mean costs of all episodes of the round, by name, for `AlgorithmSpec.constraints`; None: those of the
    trajectories."""
    anchor: Anchor | None = None
    """Anchor of elastic weight consolidation."""
    rounds: tuple[int, int] = (1, 1)
    """Number of the round, from 1, and the total; `algorithm.decay` extends over them."""


@dataclass(frozen=True, kw_only=True)
class RewardTrainingRequest(TrainingRequest):
    """Training of a reward model. It starts from the trained weights of a policy checkpoint; a reward model is trained
    further, and stays unchanged if there are no training examples."""

    judged: Sequence[JudgedCollection]
    """Collections of episodes, the newest first; all are trained on."""
