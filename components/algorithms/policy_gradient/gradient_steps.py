"""Gradient steps of a policy gradient: minibatches, guards and metrics.

The gradient is a function of the trajectories that it is computed on (`Backward`), so a guard that strikes can
recompute it for each trajectory separately.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from components.algorithms.loop import schedule
from components.algorithms.loop.guards import TrainingGuards
from components.algorithms.loop.loss_scale import LossScale
from components.algorithms.loop.metrics import mean_metrics
from components.algorithms.policy_gradient.training_data import learned_tokens
from components.algorithms.spec import PolicyGradientSpec
from components.trajectories.schema import Trajectory

T = TypeVar("T")
Group = list[Trajectory]
Backward = Callable[[list[Trajectory]], tuple[dict[str, float], dict[str, float]]]
"""Function that adds the gradient of the loss on these trajectories to the parameters, scaled down to max_grad_norm. It
returns the measured metrics (including `GUARDED_METRICS`) and token counts."""

GUARDED_METRICS = ("loss", "grad_norm", "value_grad_norm", "kl_sampler", "kl_old", "entropy")
"""Metrics that guards check. value_grad_norm exists if values are learned, kl_old if the old policy of the ratios is
not the sampler."""

Outlier = Callable[[Trajectory], tuple[int, float]]
"""Function that returns the sampled token of a trajectory with the largest change in log-probability, and the change in
nats (`training_data.largest_log_ratio`)."""


def take_steps(
    spec: PolicyGradientSpec,
    optimizer: torch.optim.Optimizer,
    groups: list[Group],
    backward: Backward,
    *,
    outlier: Outlier,
    loss_scale: LossScale,
    rates: Sequence[float],
    step: int,
    seed: int,
    scratch: Path,
    on_step: Callable[[dict[str, float]], None],
    earlier_steps: Sequence[dict[str, float]],
    rounds: schedule.Rounds,
) -> tuple[int, dict[str, float]]:
    """Take `spec.epochs * spec.minibatches` gradient steps, or fewer if there are fewer groups. Return the new step
    count and the mean metrics.

    rates: learning rate of each parameter group of the optimizer, after the warm-up. earlier_steps: metrics of the
    steps that an interrupted run took after step `step`; parameters and optimizer are in the state after those steps.
    Raises TrainingDiverged if a guard stops the training (`guards`).
    """
    guards = TrainingGuards(scratch)
    logs = list(earlier_steps)
    minibatches = list(batches(groups, spec, seed, step))
    for index, minibatch in enumerate(minibatches):
        if index < len(earlier_steps):
            continue
        number = step + index + 1
        share = schedule.share(spec, number, rounds, index / len(minibatches))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        step_metrics = _gradient_step(spec, optimizer, minibatch, backward, outlier, loss_scale, number, guards)
        metrics = {"step": float(number), **step_metrics}
        logs.append(metrics)
        on_step(metrics)
    return step + len(logs), mean_metrics(logs)


def batches(groups: list[Group], spec: PolicyGradientSpec, seed: int, step: int) -> Iterator[list[Group]]:
    """Yield the groups of each gradient step after step `step`; each epoch has its own order."""
    for epoch in range(spec.epochs):
        order = list(groups)
        random.Random(f"{seed}-{step}-{epoch}").shuffle(order)
        for minibatch in _parts(order, spec.minibatches):
            step += 1
            yield minibatch


def _parts(groups: list[Group], count: int) -> list[list[Group]]:
    """Distribute groups over minibatches of nearly equal size; leave out empty ones."""
    return [minibatch for minibatch in (groups[index::count] for index in range(count)) if minibatch]


def _gradient_step(
    spec: PolicyGradientSpec,
    optimizer: torch.optim.Optimizer,
    groups: list[Group],
    backward: Backward,
    outlier: Outlier,
    loss_scale: LossScale,
    step: int,
    guards: TrainingGuards,
) -> dict[str, float]:
    started = time.monotonic()
    trajectories = [trajectory for group in groups for trajectory in group]
    measured, counts = backward(trajectories)
    skipped = not loss_scale.overflowed(measured) and _struck(
        spec, optimizer, measured, trajectories, backward, outlier, loss_scale, step, guards
    )
    return finish(optimizer, measured, counts, loss_scale, skipped=skipped, started=started)


def finite_step(
    optimizer: torch.optim.Optimizer,
    backward: Callable[[], tuple[dict[str, float], dict[str, float]]],
    non_finite_guard: Callable[[dict[str, float]], bool],
    loss_scale: LossScale,
) -> dict[str, float]:
    """Take one gradient step that only the guard `non_finite` checks; return its metrics.

    backward: as `Backward`. non_finite_guard: called if the loss is not finite, or if the gradient is not finite
    without an overflow of the scaled gradient; returns True to skip the step.
    """
    started = time.monotonic()
    measured, counts = backward()
    broken = not all(math.isfinite(measured[name]) for name in ("loss", "grad_norm"))
    skipped = broken and not loss_scale.overflowed(measured) and non_finite_guard(measured)
    return finish(optimizer, measured, counts, loss_scale, skipped=skipped, started=started)


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
    scale = scale_metrics(loss_scale, measured)
    overflowed = loss_scale.overflowed(measured)
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


def scale_metrics(loss_scale: LossScale, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the loss scale metrics of a step; empty if the loss is not scaled."""
    if not loss_scale.enabled:
        return {}
    return {"loss_scale": loss_scale.value, "overflowed_steps": float(loss_scale.overflowed(measured))}


def examples_by_step(examples: Sequence[T], epochs: int, size: int, seed: int, step: int) -> Iterator[list[T]]:
    """Yield the `size` examples of each gradient step; each epoch has its own order."""
    for epoch in range(epochs):
        order = list(examples)
        random.Random(f"{seed}-{step}-{epoch}").shuffle(order)
        for start in range(0, len(order), size):
            yield order[start : start + size]


def _struck(
    spec: PolicyGradientSpec,
    optimizer: torch.optim.Optimizer,
    measured: dict[str, float],
    trajectories: list[Trajectory],
    backward: Backward,
    outlier: Outlier,
    loss_scale: LossScale,
    step: int,
    guards: TrainingGuards,
) -> bool:
    """Return True if a guard skips the step. If a guard strikes, each trajectory is measured separately; the gradient
    of the batch is restored afterwards."""
    checked = {name: measured[name] for name in GUARDED_METRICS if name in measured}
    by_kl = "kl_old" if "kl_old" in checked else "kl_sampler"
    kl, entropy = checked[by_kl], checked["entropy"]
    finite = all(math.isfinite(value) for name, value in checked.items() if name != "entropy")
    broken = next(
        (name for name in ("grad_norm", "value_grad_norm") if not math.isfinite(checked.get(name, 0.0))), "loss"
    )
    rules = [
        ("non_finite", not finite, spec.non_finite, broken, loss_scale.advice("Lower algorithm.learning_rate")),
        (
            "high_kl",
            kl > spec.max_kl,
            spec.high_kl,
            by_kl,
            f"{by_kl} is the KL divergence from the old policy in nats per token; algorithm.max_kl allows "
            f"{spec.max_kl:g}. "
            "Lower algorithm.learning_rate or algorithm.epochs",
        ),
        (
            "low_entropy",
            entropy < spec.min_entropy,
            spec.low_entropy,
            "certainty",
            f"algorithm.min_entropy requires {spec.min_entropy:g} nats per token. Raise collect.temperature or "
            "algorithm.kl_coefficient, or lower algorithm.learning_rate",
        ),
    ]
    struck = [rule for rule in rules if rule[1]]
    if not struck:
        return False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    measurements: dict[str, dict[str, float]] = {}

    def measure(trajectory: Trajectory) -> dict[str, float]:
        if trajectory.id not in measurements:
            for parameter in parameters:
                parameter.grad = None
            measured_alone, _ = backward([trajectory])
            measurements[trajectory.id] = {name: measured_alone[name] for name in checked} | {
                "certainty": -measured_alone["entropy"]
            }
        return measurements[trajectory.id]

    skips = []
    try:
        for guard, _, action, by, advice in struck:
            learned = [trajectory for trajectory in trajectories if learned_tokens(spec, trajectory)]
            step_outlier = outlier if guard == "high_kl" else None
            skips.append(
                guards.strike(guard, action, step, checked, learned, measure, step_outlier, by=by, advice=advice)
            )
    finally:
        for parameter, grad in zip(parameters, gradients, strict=True):
            parameter.grad = grad
    return any(skips)
