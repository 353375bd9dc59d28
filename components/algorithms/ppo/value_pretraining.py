"""Value pretraining: gradient steps of a new critic alone, before the policy's first gradient step (VC-PPO,
arXiv:2503.01491; VAPO, arXiv:2504.05118, section 4.1).

With an untrained critic, advantages equal the bare rewards, and the first value targets distort the hidden states that
the critic shares with the policy. So the critic first learns the future rewards (λ = 1) of the current policy: the
policy's parameters get no gradient, and neither they nor their optimizer moments change. The policy's hidden states,
which a value head reads, are computed once. The learning rate is constant and values are not clipped. Pretraining steps
are numbered up to 0, so that the policy's gradient steps count from 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from components.algorithms.loop import distributed
from components.algorithms.loop.epochs import GuardedStep, StepMeasures, take_gradient_steps
from components.algorithms.loop.metrics import token_counts
from components.algorithms.loop.sums import Sums
from components.algorithms.policy import sharded
from components.algorithms.policy.packing import Pack, PackPlan
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient import losses
from components.algorithms.policy_gradient.gradient_steps import batches
from components.algorithms.ppo.actions import Actions
from components.algorithms.ppo.critic import ValueCritic
from components.algorithms.trainer import StepMetrics, TrainingContext
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.ppo.spec import PPOSpec

Prepared = tuple[PackPlan, Pack | None, torch.Tensor | None]
"""A planned pack and, in the process that computes it, the pack and the inputs of the value head
(`ValueCritic.constants`)."""


def pretrain(spec: PPOSpec, context: TrainingContext, critic: ValueCritic, actions: Actions) -> list[StepMetrics]:
    """Take `spec.value_pretraining_steps` gradient steps of the critic. Return the metrics of each step, including
    those that an interrupted run took.

    actions: training data with the returns to learn. Raises TrainingDiverged if the guard `non_finite` stops the
    training.
    """
    steps = spec.value_pretraining_steps
    minibatches = [
        [trajectory for group in groups for trajectory in group]
        for groups in batches(actions.groups, spec.model_copy(update={"epochs": 1}), context.seed, 0)
    ]
    prepared: dict[tuple[str, ...], list[Prepared]] = {}

    def backward(batch: Sequence[Trajectory]) -> StepMeasures:
        ids = tuple(trajectory.id for trajectory in batch)
        if ids not in prepared:
            prepared[ids] = _prepared(critic, actions, batch)
        return _backward(spec, context.policy, critic, actions, prepared[ids])

    advice = "Lower algorithm.learning_rate or algorithm.value_learning_rate_ratio"
    rate = spec.learning_rate * spec.value_learning_rate_ratio  # of the policy's group too, which has no gradient
    return take_gradient_steps(
        replace(context, step=-steps, on_total=lambda total: context.on_total(total + spec.epochs * len(minibatches))),
        [minibatches[index % len(minibatches)] for index in range(steps)],
        GuardedStep(spec, context, backward, lambda trajectory: trajectory, advice),
        [rate] * len(context.optimizer.param_groups),
        lambda *_: 1.0,
    )


def _prepared(critic: ValueCritic, actions: Actions, batch: Sequence[Trajectory]) -> list[Prepared]:
    packs = actions.packs(batch)
    own = {id(planned): planned.lay_out() for (_, planned), _ in distributed.share(packs)}
    constants = {key: critic.constants(pack) for key, pack in own.items()}
    return [(planned, own.get(id(planned)), constants.get(id(planned))) for _, planned in packs]


def _backward(
    spec: PPOSpec, policy: Policy, critic: ValueCritic, actions: Actions, prepared: Sequence[Prepared]
) -> StepMeasures:
    """Add the gradient of the value loss on a batch to the critic's parameters, scaled down to max_grad_norm. Return
    the measured metrics and token counts."""
    sums = Sums()
    for (_, host_pack, constants_UD), real in distributed.share(prepared):
        assert host_pack is not None, "laid out, because this process computes it"
        pack = host_pack.to(policy.device)
        return_S = actions.return_A[host_pack.number_S].to(policy.device)
        with critic.values(pack, constants_UD) as value_S:
            loss = (losses.clipped_value_loss(value_S, value_S.detach(), return_S, None) * pack.weight_S).sum()
            policy.loss_scale.backward(loss if real else loss * 0)
        sums.add({"loss": loss}, real=real)
        sums.add(value_columns(value_S, return_S), real=real)
    distributed.sum_gradients(critic.parameters.values())
    policy.loss_scale.unscale(critic.parameters.values())
    norm = sharded.clip(critic.parameters.values(), spec.max_grad_norm)
    totals, counts = sums.totals(), token_counts([planned for planned, _, _ in prepared])
    explained = explained_variance(totals, round(counts["sampled_tokens"]))
    return {"loss": totals["loss"], "grad_norm": float(norm), "explained_variance": explained}, counts


SPREAD = 1e-6
"""Variance of the normalised returns below which the explained variance is undefined."""


def value_columns(value_S: torch.Tensor, return_S: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the (S,) columns, in float64, whose sums `explained_variance` reads. return_S: targets of the values."""
    error_S, target_S = (return_S - value_S.detach()).double(), return_S.double()
    squares = {"errors squared": error_S.square(), "returns squared": target_S.square()}
    return {"errors": error_S, "returns": target_S, **squares}


def explained_variance(sums: Mapping[str, float], count: int) -> float:
    """Return 1 - Var(R - V) / Var(R) of `count` values: 1 if values equal the returns, 0 if they are no better than the
    mean return; NaN if the returns have no variance."""

    def variance(name: str) -> float:
        return sums[f"{name} squared"] / count - (sums[name] / count) ** 2

    spread = variance("returns")
    return 1 - variance("errors") / spread if spread > SPREAD else math.nan
