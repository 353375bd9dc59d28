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
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from components.algorithms.loop import distributed
from components.algorithms.loop.guards import TrainingGuards
from components.algorithms.loop.metrics import token_counts
from components.algorithms.policy import sharded
from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient import losses
from components.algorithms.policy_gradient.gradient_steps import batches, finite_step
from components.algorithms.ppo.actions import Actions
from components.algorithms.ppo.critic import ValueCritic
from components.algorithms.ppo.value_metrics import add_values, explained_variance
from components.algorithms.spec import PPOSpec
from components.trajectories.schema import Trajectory

Prepared = tuple[Pack, torch.Tensor | None]
"""A pack and the inputs of the value head (`ValueCritic.constants`)."""


def pretrain(
    spec: PPOSpec,
    policy: Policy,
    critic: ValueCritic,
    optimizer: torch.optim.Optimizer,
    actions: Actions,
    *,
    seed: int,
    scratch: Path,
    on_step: Callable[[dict[str, float]], None],
    earlier_steps: Sequence[dict[str, float]] = (),
) -> list[dict[str, float]]:
    """Take `spec.value_pretraining_steps` gradient steps of the critic. Return the metrics of each step, including
    those that an interrupted run took (`earlier_steps`).

    actions: training data with the returns to learn. Raises TrainingDiverged if the guard `non_finite` stops the
    training.
    """
    guards, logs = TrainingGuards(scratch), list(earlier_steps)
    minibatches = [
        [trajectory for group in groups for trajectory in group]
        for groups in batches(actions.groups, spec.model_copy(update={"epochs": 1}), seed, 0)
    ]
    prepared: dict[int, list[Prepared]] = {}
    for group in optimizer.param_groups:
        group["lr"] = spec.learning_rate * spec.value_learning_rate_ratio  # the policy's group has no gradient
    for index in range(len(earlier_steps), spec.value_pretraining_steps):
        batch_index = index % len(minibatches)
        if batch_index not in prepared:
            prepared[batch_index] = _prepared(critic, actions, minibatches[batch_index])
        number = index + 1 - spec.value_pretraining_steps
        metrics = finite_step(
            optimizer,
            partial(_backward, spec, policy, critic, actions, prepared[batch_index]),
            partial(_struck, spec, policy, critic, actions, minibatches[batch_index], number, guards),
            policy.loss_scale,
        )
        logs.append({"step": float(number), **metrics})
        on_step(logs[-1])
    return logs


def _prepared(critic: ValueCritic, actions: Actions, batch: Sequence[Trajectory]) -> list[Prepared]:
    packs = actions.packs(batch)
    constants = {id(pack): critic.constants(pack) for (_, pack), _ in distributed.share(packs)}
    return [(pack, constants.get(id(pack))) for _, pack in packs]


def _backward(
    spec: PPOSpec, policy: Policy, critic: ValueCritic, actions: Actions, prepared: Sequence[Prepared]
) -> tuple[dict[str, float], dict[str, float]]:
    """Add the gradient of the value loss on a batch to the critic's parameters, scaled down to max_grad_norm. Return
    the measured metrics and token counts."""
    sums: dict[str, float] = defaultdict(float)
    for (host_pack, constants_UD), real in distributed.share(prepared):
        pack, pack_sums = host_pack.to(policy.device), dict[str, float]()
        return_S = actions.return_A[host_pack.number_S].to(policy.device)
        with critic.values(pack, constants_UD) as value_S:
            loss = (losses.clipped_value_loss(value_S, value_S.detach(), return_S, None) * pack.weight_S).sum()
            policy.loss_scale.backward(loss if real else loss * 0)
        pack_sums["loss"] = loss.item()
        add_values(pack_sums, value_S.detach(), return_S)
        for name, value in pack_sums.items():
            sums[name] += value if real else 0.0
    distributed.sum_gradients(critic.parameters.values())
    policy.loss_scale.unscale(critic.parameters.values())
    sums = distributed.sums(sums)
    grad_norm = sharded.clip(critic.parameters.values(), spec.max_grad_norm)
    packs = [pack for pack, _ in prepared]
    explained = explained_variance(sums, sum(len(pack.token_S) for pack in packs))
    return {"loss": sums["loss"], "grad_norm": grad_norm, "explained_variance": explained}, token_counts(packs)


def _struck(
    spec: PPOSpec,
    policy: Policy,
    critic: ValueCritic,
    actions: Actions,
    batch: Sequence[Trajectory],
    step: int,
    guards: TrainingGuards,
    measured: dict[str, float],
) -> bool:
    """Return True if the guard `non_finite` skips the step. Each trajectory is measured separately."""

    def measure(trajectory: Trajectory) -> dict[str, float]:
        for parameter in critic.parameters.values():
            parameter.grad = None
        measured_alone, _ = _backward(spec, policy, critic, actions, _prepared(critic, actions, [trajectory]))
        return {name: measured_alone[name] for name in ("loss", "grad_norm")}

    return guards.strike(
        "non_finite",
        spec.non_finite,
        step,
        {name: measured[name] for name in ("loss", "grad_norm")},
        batch,
        measure,
        by="grad_norm" if math.isfinite(measured["loss"]) else "loss",
        advice=policy.loss_scale.advice("Lower algorithm.learning_rate or algorithm.value_learning_rate_ratio"),
    )
