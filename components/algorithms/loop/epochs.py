"""Training in epochs: one gradient step for each batch of examples.

An example is one term of the loss and belongs to a trajectory. The algorithm defines its examples, its batches, and a
function that adds the gradient of a batch (`Backward`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Generic, TypeVar, overload

import torch

from components.algorithms.loop import distributed
from components.algorithms.loop.guards import GuardRule, TrainingGuards
from components.algorithms.loop.loss_scale import LossScale
from components.algorithms.loop.metrics import token_counts
from components.algorithms.loop.sums import Sums
from components.algorithms.policy import sharded
from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.algorithms.spec import OptimizerSpec
from components.algorithms.trainer import StepMetrics, TrainingContext
from components.trajectories.schema import Trajectory

T = TypeVar("T")
StepMeasures = tuple[dict[str, float], dict[str, float]]
"""Metrics of a batch (including loss and grad_norm), and its token counts."""
Backward = Callable[[Sequence[T]], StepMeasures]
"""Function that adds the gradient of the loss on these examples to the parameters, scaled down to max_grad_norm."""


class GuardedStep(Generic[T]):
    """Gradient step on a batch of examples, which only the guard `non_finite` checks.

    backward: adds the gradient of a batch. trajectory_of: returns the trajectory of an example. advice: remedy for a
    loss or a gradient that is not finite.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        context: TrainingContext,
        backward: Backward[T],
        trajectory_of: Callable[[T], Trajectory],
        advice: str = "Lower algorithm.learning_rate",
    ):
        self._loss_scale = context.policy.loss_scale
        self._rule = GuardRule("non_finite", spec.non_finite, "grad_norm", self._loss_scale.advice(advice))
        self._optimizer = context.optimizer
        self._guards = TrainingGuards(context.scratch)
        self._backward = backward
        self._trajectory_of = trajectory_of

    def __call__(self, batch: Sequence[T], number: int) -> StepMetrics:
        """Take gradient step `number` and return its metrics. Raises TrainingDiverged if the guard stops the
        training."""
        started = time.monotonic()
        measured, counts = self._backward(batch)
        broken = not all(map(math.isfinite, _guarded_metrics(measured).values()))
        skipped = broken and not self._loss_scale.overflowed(measured) and self._strike(batch, number, measured)
        return finish(self._optimizer, measured, counts, self._loss_scale, skipped=skipped, started=started)

    def _strike(self, batch: Sequence[T], number: int, measured: dict[str, float]) -> bool:
        """Return True if the guard skips the step. The examples of each trajectory are measured separately."""
        examples_of: dict[str, list[T]] = {}
        for example in batch:
            examples_of.setdefault(self._trajectory_of(example).id, []).append(example)

        def measure(trajectory: Trajectory) -> dict[str, float]:
            self._optimizer.zero_grad(set_to_none=True)
            return _guarded_metrics(self._backward(examples_of[trajectory.id])[0])

        trajectories = [self._trajectory_of(examples[0]) for examples in examples_of.values()]
        return self._guards.strike(self._rule, number, _guarded_metrics(measured), trajectories, measure)


def _guarded_metrics(measured: dict[str, float]) -> dict[str, float]:
    return {name: measured[name] for name in ("loss", "grad_norm")}


def take_gradient_steps(
    context: TrainingContext,
    batches: Sequence[Sequence[T]],
    gradient_step: Callable[[Sequence[T], int], StepMetrics],
    rates: Sequence[float],
    share: Callable[[int, float], float],
) -> list[StepMetrics]:
    """Take a gradient step on each batch and return the metrics of all steps. The batches of the steps that an
    interrupted run took are left out.

    rates: learning rate of each parameter group of the optimizer. share: its factor, a function of the number of the
    step and of the fraction of batches before it.
    """
    logs = list(context.earlier_steps)
    context.on_total(len(batches))
    for index in range(len(logs), len(batches)):
        number = context.step + index + 1
        factor = share(number, index / len(batches))
        for group, rate in zip(context.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        metrics = {"step": float(number), **gradient_step(batches[index], number)}
        logs.append(metrics)
        context.on_step(metrics)
    return logs


class StepBatches(Sequence[list[T]]):
    """Examples of each gradient step, which are read when it begins. order: returns the places of all examples in an
    epoch."""

    def __init__(self, examples: Sequence[T], epochs: int, size: int, order: Callable[[int], Sequence[int]]):
        self._examples = examples
        self._epochs = epochs
        self._size = size
        self._steps = -(-len(examples) // size)
        """Steps of an epoch."""
        self._order = lru_cache(maxsize=1)(order)

    def __len__(self) -> int:
        return self._epochs * self._steps

    @overload
    def __getitem__(self, index: int) -> list[T]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[T]]: ...
    def __getitem__(self, index: int | slice) -> list[T] | list[list[T]]:
        steps = range(len(self))[index]
        return self._batch(steps) if isinstance(steps, int) else list(map(self._batch, steps))

    def _batch(self, index: int) -> list[T]:
        epoch, step = divmod(index, self._steps)
        places = self._order(epoch)[step * self._size : (step + 1) * self._size]
        return [self._examples[int(place)] for place in places]


def examples_by_step(examples: Sequence[T], epochs: int, size: int, seed: int, step: int) -> StepBatches[T]:
    """Return the `size` examples of each gradient step; each epoch has its own order."""

    def order(epoch: int) -> list[int]:
        places = list(range(len(examples)))
        random.Random(f"{seed}-{step}-{epoch}").shuffle(places)
        return places

    return StepBatches(examples, epochs, size, order)


def add_mean_gradient(
    policy: Policy, packs: Sequence[Pack], token_losses: Callable[[Pack], torch.Tensor], max_grad_norm: float
) -> StepMeasures:
    """Add the gradient of the mean loss over the sampled tokens of all packs to the parameters; return as `Backward`.
    token_losses: returns the (S,) losses of a pack."""
    counts = token_counts(packs)
    sums = Sums()
    for packed, real in distributed.share_with_dropout(packs):
        loss = token_losses(packed).sum() / counts["sampled_tokens"]
        policy.loss_scale.backward(loss if real else loss * 0)
        sums.add({"loss": loss}, real=real)
    finished = finish_gradient(policy, max_grad_norm)
    return {**sums.totals(), **finished}, counts


def finish_gradient(policy: Policy, max_grad_norm: float) -> dict[str, float]:
    """Complete the gradient after the losses of all packs: sum it over processes, remove the loss scale, add the
    penalty, and scale it down to max_grad_norm. Return its norm before, and the penalty if there is one."""
    parameters = policy.parameters.values()
    distributed.sum_gradients(parameters)
    policy.loss_scale.unscale(parameters)
    penalty = {"ewc": policy.add_penalty()} if policy.penalty else {}
    return {"grad_norm": float(sharded.clip(parameters, max_grad_norm)), **penalty}


def finish(
    optimizer: torch.optim.Optimizer,
    measured: Mapping[str, float],
    counts: Mapping[str, float],
    loss_scale: LossScale,
    *,
    skipped: bool,
    started: float,
) -> dict[str, float]:
    """Take the step, or skip it if a guard skips it or a scaled gradient overflowed. Return its metrics. started: start
    of the step on the monotonic clock."""
    overflowed = loss_scale.overflowed(measured)
    scale = {"loss_scale": loss_scale.value, "overflowed_steps": float(overflowed)} if loss_scale.enabled else {}
    if not (skipped or overflowed):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not skipped:
        loss_scale.update(overflowed)
    seconds = time.monotonic() - started
    return {
        **{name: value for name, value in measured.items() if math.isfinite(value)},
        "learning_rate": optimizer.param_groups[0]["lr"],
        "skipped_steps": float(skipped or overflowed),
        **scale,
        **counts,
        "tokens_per_s": counts["tokens"] / seconds,
        "seconds": seconds,
    }
