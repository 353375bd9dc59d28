"""Gradient steps of a policy gradient: minibatches and guards.

The gradient is a function of the trajectories that it is computed on (`Backward`), so a guard that strikes can
recompute it for each trajectory separately.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from components.algorithms.loop import schedule
from components.algorithms.loop.epochs import Backward, finish, take_gradient_steps
from components.algorithms.loop.guards import GuardRule, TrainingGuards
from components.algorithms.loop.metrics import mean_metrics
from components.algorithms.policy_gradient.training_data import SAMPLER_GAP, learned_tokens
from components.algorithms.trainer import StepMetrics, TrainingContext, TrainingResult
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.policy_gradient.spec import PolicyGradientSpec

Group = list[Trajectory]
GUARDED_METRICS = ("loss", "grad_norm", "value_grad_norm", "kl_sampler", "kl_old", "entropy")
"""Metrics that guards check. value_grad_norm exists if values are learned, kl_old if the old policy of the ratios is
not the sampler."""

Outlier = Callable[[Trajectory], tuple[int, float]]
"""Function that returns the sampled token of a trajectory with the largest change in log-probability, and the change in
nats (`training_data.largest_log_ratio`)."""


def take_steps(
    spec: PolicyGradientSpec,
    context: TrainingContext,
    groups: list[Group],
    backward: Backward[Trajectory],
    outlier: Outlier,
    rates: Sequence[float],
) -> TrainingResult:
    """Take `spec.epochs * spec.minibatches` gradient steps, or fewer if there are fewer groups. Return the new step
    count and the mean metrics.

    rates: learning rate of each parameter group of the optimizer, after the warm-up. Raises TrainingDiverged if a guard
    stops the training (`guards`).
    """
    logs = take_gradient_steps(
        context,
        list(batches(groups, spec, context.seed, context.step)),
        MinibatchStep(spec, context, backward, outlier),
        rates,
        lambda number, done: schedule.share(spec, number, context.rounds, done),
    )
    return context.step + len(logs), mean_metrics(logs)


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


class MinibatchStep:
    """Gradient step on the groups of a minibatch, which all guards check. backward: returns the `GUARDED_METRICS`."""

    def __init__(
        self,
        spec: PolicyGradientSpec,
        context: TrainingContext,
        backward: Backward[Trajectory],
        outlier: Outlier,
    ):
        self._spec = spec
        self._first = context.step + 1
        self._optimizer = context.optimizer
        self._loss_scale = context.policy.loss_scale
        self._guards = TrainingGuards(context.scratch)
        self._backward = backward
        self._outlier = outlier

    def __call__(self, groups: Sequence[Group], number: int) -> StepMetrics:
        """Take gradient step `number` and return its metrics. Raises TrainingDiverged if a guard stops the training."""
        started = time.monotonic()
        trajectories = [trajectory for group in groups for trajectory in group]
        measured, counts = self._backward(trajectories)
        if number > self._first:
            measured.pop(SAMPLER_GAP, None)
        skipped = not self._loss_scale.overflowed(measured) and self._skips_step(measured, trajectories, number)
        return finish(self._optimizer, measured, counts, self._loss_scale, skipped=skipped, started=started)

    def _skips_step(self, measured: dict[str, float], trajectories: list[Trajectory], number: int) -> bool:
        """Return True if a guard skips the step. If a guard strikes, each trajectory is measured separately; the
        gradient of the batch is restored afterwards."""
        checked = {name: measured[name] for name in GUARDED_METRICS if name in measured}
        rules = self._violated(checked)
        if not rules:
            return False
        learned = [trajectory for trajectory in trajectories if learned_tokens(self._spec, trajectory)]
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        measurements: dict[str, dict[str, float]] = {}

        def measure(trajectory: Trajectory) -> dict[str, float]:
            if trajectory.id not in measurements:
                for parameter in parameters:
                    parameter.grad = None
                measured_alone, _ = self._backward([trajectory])
                measurements[trajectory.id] = {name: measured_alone[name] for name in checked} | {
                    "certainty": -measured_alone["entropy"]
                }
            return measurements[trajectory.id]

        try:
            skips = [
                self._guards.strike(
                    rule, number, checked, learned, measure, self._outlier if rule.guard == "high_kl" else None
                )
                for rule in rules
            ]
        finally:
            for parameter, grad in zip(parameters, gradients, strict=True):
                parameter.grad = grad
        return any(skips)

    def _violated(self, checked: dict[str, float]) -> list[GuardRule]:
        """Return the rules that a step with these metrics violates."""
        spec, rules = self._spec, []
        by_kl = "kl_old" if "kl_old" in checked else "kl_sampler"
        if not all(math.isfinite(value) for name, value in checked.items() if name != "entropy"):
            norms = (name for name in ("grad_norm", "value_grad_norm") if not math.isfinite(checked.get(name, 0.0)))
            advice = self._loss_scale.advice("Lower algorithm.learning_rate")
            rules.append(GuardRule("non_finite", spec.non_finite, next(norms, "loss"), advice))
        if checked[by_kl] > spec.max_kl:
            advice = (
                f"{by_kl} is the KL divergence from the old policy in nats per token; algorithm.max_kl allows "
                f"{spec.max_kl:g}. Lower algorithm.learning_rate or algorithm.epochs"
            )
            rules.append(GuardRule("high_kl", spec.high_kl, by_kl, advice))
        if checked["entropy"] < spec.min_entropy:
            advice = (
                f"algorithm.min_entropy requires {spec.min_entropy:g} nats per token. Raise collect.temperature or "
                "algorithm.kl_coefficient, or lower algorithm.learning_rate"
            )
            rules.append(GuardRule("low_entropy", spec.low_entropy, "certainty", advice))
        return rules
