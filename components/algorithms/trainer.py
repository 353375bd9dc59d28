"""Trainings: their requests, what an algorithm builds for one of them, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from components.algorithms.continual.spec import EWCSpec
from components.compute.spec import SaveEvery, Strategy
from components.models.spec import ModelSpec
from components.trajectories.schema import Score, Trajectory

if TYPE_CHECKING:
    import torch

    from components.algorithms.policy.policy import Policy

StepMetrics = dict[str, float]
TrainingResult = tuple[int, dict[str, float]]
"""Number of gradient steps since the base model, and the mean metrics of this training."""


@dataclass(frozen=True)
class Rounds:
    """Position of a training among the rounds of a run: round `number` of `total`, both counted from 1."""

    number: int = 1
    total: int = 1


@dataclass(frozen=True)
class Anchor:
    """Anchor of the penalty: a checkpoint and its training trajectories."""

    spec: EWCSpec
    checkpoint: Path
    trajectories: Sequence[Trajectory]
    """Trajectories that the checkpoint was trained on."""


@dataclass(frozen=True)
class JudgedCollection:
    """A collection: episodes of one policy with their scores."""

    trajectories: Sequence[Trajectory]
    """Trajectories; ids are unique over all collections of a training."""
    scores: Sequence[Score]
    """Scores in any order; their components are the labels of the heads."""
    predicted: Mapping[str, float | None] | None = None
    """Rewards that a reward model predicted, by trajectory id: only scenarios that these order wrongly are examples
    (adversarial examples). None: all are."""


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
    save_every: SaveEvery = "auto"
    """Seconds between two saves of the unfinished training to `scratch` (`compute.save_every`)."""
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
    rounds: Rounds = Rounds()
    """Round of the training, over which the learning rate decays."""


@dataclass(frozen=True, kw_only=True)
class RewardTrainingRequest(TrainingRequest):
    """Training of a reward model. It starts from the trained weights of a policy checkpoint; a reward model is trained
    further, and stays unchanged if there are no training examples."""

    judged: Sequence[JudgedCollection]
    """Collections of episodes, the newest first; all are trained on."""


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


@dataclass(frozen=True, kw_only=True)
class TrainingContext(PolicyTrainingRequest):
    """A request and the state that trainers share. `trajectories` are those to learn from, `on_step` records the
    metrics of a gradient step once the step is taken."""

    policy: Policy
    """Policy in training. Its reference is `policy.as_reference()`."""
    optimizer: torch.optim.Optimizer
    """Optimizer with a group of parameters for the policy, and one for the critic if there is one."""
    step: int = 0
    """Number of gradient steps before this training."""
    earlier_steps: Sequence[StepMetrics] = ()
    """Metrics of the gradient steps that an interrupted run of this training took. Policy, critic and optimizer are in
    the state after those steps."""
    critic: TrainedModule | None = None
    """Result of `AlgorithmSpec.critic`."""

    @classmethod
    def of(cls, request: TrainingRequest, **state: Any) -> Self:
        """Return the context of a request; state: further fields, and those that replace the request's."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in vars(request).items() if name in names} | state)


class GroupGradients(Protocol):
    """Gradients of the groups of one batch that carry signal. Each is a (P,) vector on the CPU."""

    groups: dict[str, list[Trajectory]]
    """Groups with a non-zero advantage, by name. Their trajectories have their mean advantage."""

    @property
    def parameters(self) -> int:
        """Return P, the number of trained parameters."""
        ...

    def group(self, name: str) -> torch.Tensor:
        """Return the gradient of one group."""
        ...

    def batch(self) -> torch.Tensor:
        """Return the gradient of the whole batch; zeros if no group carries signal."""
        ...

    def likelihood(self, trajectory: Trajectory, temperature: float) -> torch.Tensor:
        """Return the gradient of the negative log-likelihood of a trajectory's sampled tokens at a sampling
        temperature."""
        ...

    def log_likelihoods(self, trajectories: Sequence[Trajectory], temperature: float) -> list[float]:
        """Return the log-likelihood in nats of the sampled tokens of each trajectory at a sampling temperature."""
        ...


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
