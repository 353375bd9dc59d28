"""Trainers: what an algorithm builds for one training, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from components.algorithms.loop.schedule import ONLY_ROUND, Rounds
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    import torch

    from components.algorithms.policy.policy import Policy

StepMetrics = dict[str, float]
TrainingResult = tuple[int, dict[str, float]]
"""Number of gradient steps since the base model, and the mean metrics of this training."""


class TrainedModule(Protocol):
    """Module that is trained beside the policy, and saved with each checkpoint."""

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by name."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files that `load` reads."""
        ...

    def load(self, folder: Path) -> None:
        """Read the files that `save` wrote. Raises ArtifactError if they do not fit."""
        ...


@dataclass(frozen=True)
class TrainingContext:
    """State that trainers share."""

    policy: Policy
    """Policy in training. Its reference is `policy.as_reference()`."""
    optimizer: torch.optim.Optimizer
    """Optimizer with a group of parameters for the policy, and one for the critic if there is one."""
    base_dir: Path
    """Local folder of the base model."""
    trajectories: Sequence[Trajectory]
    scratch: Path
    """Folder for the files of an unfinished training."""
    seed: int
    on_step: Callable[[StepMetrics], None]
    """Function that records the metrics of a gradient step, once the step is taken."""
    on_total: Callable[[int], None] = lambda total: None
    """Function that receives the number of gradient steps of this training before the first one."""
    step: int = 0
    """Number of gradient steps before this training."""
    earlier_steps: Sequence[StepMetrics] = ()
    """Metrics of the gradient steps that an interrupted run of this training took. Policy, critic and optimizer are in
    the state after those steps."""
    rounds: Rounds = ONLY_ROUND
    """Round of the training, over which the learning rate decays."""
    critic: TrainedModule | None = None
    """Result of `AlgorithmSpec.critic`."""
    start: Path | None = None
    """Checkpoint that the training starts from; None: the base model."""
    mean_costs: Mapping[str, float] | None = None
    """Mean costs of all episodes of the round; None: those of the trajectories."""
    teacher_dir: Path | None = None
    """Local folder of the base model of `AlgorithmSpec.teacher_model`."""
    warm: dict[str, Any] | None = None
    """Cache of loaded models for the next training."""


class Trainer(ABC):
    """Trainer of one training."""

    @abstractmethod
    def train(self) -> TrainingResult:
        """Take the gradient steps. Raises TrainingDiverged if a guard stops the training (`loop.guards`)."""

    def save(self, folder: Path) -> None:
        """Write further files of the checkpoint, besides those of policy, critic and optimizer."""
        return


class FunctionTrainer(Trainer):
    """Trainer that calls a function."""

    def __init__(self, function: Callable[[], TrainingResult]):
        self._function = function

    def train(self) -> TrainingResult:
        return self._function()
