"""Training in epochs: one gradient step for each batch of examples, which only the guard `non_finite` checks.

An example is one term of the loss and belongs to a trajectory. The algorithm defines its examples, its batches, and a
function that adds the gradient of a batch (`Backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import torch

from components.algorithms.loop import distributed
from components.algorithms.loop.guards import TrainingGuards
from components.algorithms.loop.metrics import token_counts
from components.algorithms.policy import sharded
from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.gradient_steps import finite_step
from components.algorithms.spec import OptimizerSpec
from components.trajectories.schema import Trajectory

T = TypeVar("T")
Backward = Callable[[Sequence[T]], tuple[dict[str, float], dict[str, float]]]
"""Function that adds the gradient of the loss on these examples to the parameters, scaled down to max_grad_norm. It
returns the measured metrics (including loss and grad_norm) and token counts."""


class GuardedStep(Generic[T]):
    """Gradient step on a batch of examples.

    backward: adds the gradient of a batch. trajectory_of: returns the trajectory of an example.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        scratch: Path,
        backward: Backward[T],
        trajectory_of: Callable[[T], Trajectory],
    ):
        self._spec = spec
        self._policy = policy
        self._optimizer = optimizer
        self._guards = TrainingGuards(scratch)
        self._backward = backward
        self._trajectory_of = trajectory_of

    def __call__(self, batch: Sequence[T], number: int) -> dict[str, float]:
        """Take gradient step `number` and return its metrics. Raises TrainingDiverged if the guard stops the
        training."""
        return finite_step(
            self._optimizer,
            lambda: self._backward(batch),
            lambda measured: self._strike(batch, number, measured),
            self._policy.loss_scale,
        )

    def _strike(self, batch: Sequence[T], number: int, measured: dict[str, float]) -> bool:
        """Return True if the guard skips the step. The examples of each trajectory are measured separately."""
        examples_of: dict[str, list[T]] = {}
        for example in batch:
            examples_of.setdefault(self._trajectory_of(example).id, []).append(example)

        def measure(trajectory: Trajectory) -> dict[str, float]:
            self._optimizer.zero_grad(set_to_none=True)
            return _guarded_metrics(self._backward(examples_of[trajectory.id])[0])

        return self._guards.strike(
            "non_finite",
            self._spec.non_finite,
            number,
            _guarded_metrics(measured),
            [self._trajectory_of(examples[0]) for examples in examples_of.values()],
            measure,
            by="grad_norm",
            advice=self._policy.loss_scale.advice("Lower algorithm.learning_rate"),
        )


def _guarded_metrics(measured: dict[str, float]) -> dict[str, float]:
    return {name: measured[name] for name in ("loss", "grad_norm")}


def take_gradient_steps(
    batches: Sequence[Sequence[T]],
    gradient_step: Callable[[Sequence[T], int], dict[str, float]],
    learning_rate: Callable[[int, float], float],
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    on_step: Callable[[dict[str, float]], None],
    earlier_steps: Sequence[dict[str, float]],
) -> list[dict[str, float]]:
    """Take a gradient step on each batch and return the metrics of all steps.

    learning_rate: function of the number of the step and of the fraction of batches before it. earlier_steps: metrics
    of the steps that an interrupted run took after step `step`; their batches are left out.
    """
    logs = list(earlier_steps)
    for index in range(len(logs), len(batches)):
        number = step + index + 1
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, index / len(batches))
        metrics = {"step": float(number), **gradient_step(batches[index], number)}
        logs.append(metrics)
        on_step(metrics)
    return logs


def add_mean_gradient(
    policy: Policy, packs: Sequence[Pack], token_losses: Callable[[Pack], torch.Tensor], max_grad_norm: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Add the gradient of the mean loss over the sampled tokens of all packs to the parameters; return as `Backward`.
    token_losses: returns the (S,) losses of a pack."""
    counts = token_counts(packs)
    total = 0.0
    for packed, real in distributed.share_with_dropout(packs):
        loss = token_losses(packed).sum() / counts["sampled_tokens"]
        policy.loss_scale.backward(loss if real else loss * 0)
        total += loss.item() if real else 0.0
    return {"loss": distributed.sums({"loss": total})["loss"], **finish_gradient(policy, max_grad_norm)}, counts


def finish_gradient(policy: Policy, max_grad_norm: float) -> dict[str, float]:
    """Complete the gradient after the losses of all packs: sum it over processes, remove the loss scale, add the
    penalty, and scale it down to max_grad_norm. Return its norm before, and the penalty if there is one."""
    parameters = policy.parameters.values()
    distributed.sum_gradients(parameters)
    policy.loss_scale.unscale(parameters)
    penalty = {"ewc": policy.add_penalty()} if policy.penalty else {}
    return {"grad_norm": sharded.clip(parameters, max_grad_norm), **penalty}
