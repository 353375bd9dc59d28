"""Value pretraining: gradient steps of a new critic alone, before the policy moves (VC-PPO, arXiv:2503.01491; VAPO,
arXiv:2504.05118, section 4.1).

Advantages by an untrained critic are those of the bare rewards, and its first targets pull at the hidden states that it
shares with the policy. So it first learns the rewards that come (λ = 1), off the policy as it stands: the policy's
parameters get no gradient, and neither they nor their moments change. Its hidden states, which a value head reads, are
computed once. Steps have a constant learning rate and no limit to how far a value moves. They are numbered up to 0, so
that the steps of the policy count from 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from components.algorithms.loop import distributed
from components.algorithms.loop.guards import Guards
from components.algorithms.loop.metrics import of_packs
from components.algorithms.policy import sharded
from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient import losses
from components.algorithms.policy_gradient.gradient_steps import batches, finite_step
from components.algorithms.ppo.actions import Actions
from components.algorithms.ppo.critic import Critic
from components.algorithms.ppo.value_metrics import add_values, explained_variance
from components.algorithms.spec import PPOSpec
from components.trajectories.schema import Trajectory

Prepared = tuple[Pack, torch.Tensor | None]
"""A pack and what the critic reads its values off (`Critic.constants`)."""


def pretrain(
    spec: PPOSpec,
    policy: Policy,
    critic: Critic,
    optimizer: torch.optim.Optimizer,
    actions: Actions,
    *,
    seed: int,
    scratch: Path,
    on_step: Callable[[dict[str, float]], None],
    taken: Sequence[dict[str, float]] = (),
) -> list[dict[str, float]]:
    """Take `spec.value_pretraining_steps` gradient steps of the critic. Returns the metrics of each, those that an
    earlier try took (`taken`) included.

    actions: with the returns to learn. Raises TrainingDiverged where the guard `non_finite` stops.
    """
    guards, logs = Guards(scratch), list(taken)
    minibatches = [
        [trajectory for group in groups for trajectory in group]
        for groups in batches(actions.groups, spec.model_copy(update={"epochs": 1}), seed, 0)
    ]
    prepared: dict[int, list[Prepared]] = {}
    for group in optimizer.param_groups:
        group["lr"] = spec.learning_rate * spec.value_learning_rate_ratio  # the policy's has no gradient
    for index in range(len(taken), spec.value_pretraining_steps):
        place = index % len(minibatches)
        if place not in prepared:
            prepared[place] = _prepared(critic, actions, minibatches[place])
        number = index + 1 - spec.value_pretraining_steps
        metrics = finite_step(
            optimizer,
            partial(_backward, spec, policy, critic, actions, prepared[place]),
            partial(_struck, spec, policy, critic, actions, minibatches[place], number, guards),
            policy.loss_scale,
        )
        logs.append({"step": float(number), **metrics})
        on_step(logs[-1])
    return logs


def _prepared(critic: Critic, actions: Actions, batch: Sequence[Trajectory]) -> list[Prepared]:
    packs = actions.packs(batch)
    constants = {id(one): critic.constants(one) for (_, one), _ in distributed.share(packs)}
    return [(one, constants.get(id(one))) for _, one in packs]


def _backward(
    spec: PPOSpec, policy: Policy, critic: Critic, actions: Actions, prepared: Sequence[Prepared]
) -> tuple[dict[str, float], dict[str, float]]:
    """Add the gradient of the value loss on a batch to the critic's parameters, scaled down to max_grad_norm. Returns
    what it measured, and counts of tokens."""
    sums: dict[str, float] = defaultdict(float)
    for (given, constants_UD), real in distributed.share(prepared):
        one, seen = given.to(policy.device), dict[str, float]()
        return_S = actions.return_A[given.number_S].to(policy.device)
        with critic.values(one, constants_UD) as value_S:
            loss = (losses.clipped_value_loss(value_S, value_S.detach(), return_S, None) * one.weight_S).sum()
            policy.loss_scale.backward(loss if real else loss * 0)
        seen["loss"] = loss.item()
        add_values(seen, value_S.detach(), return_S)
        for name, value in seen.items():
            sums[name] += value if real else 0.0
    distributed.sum_gradients(critic.parameters.values())
    policy.loss_scale.unscale(critic.parameters.values())
    sums = distributed.sums(sums)
    grad_norm = sharded.clip(critic.parameters.values(), spec.max_grad_norm)
    packs = [one for one, _ in prepared]
    explained = explained_variance(sums, sum(len(one.token_S) for one in packs))
    return {"loss": sums["loss"], "grad_norm": grad_norm, "explained_variance": explained}, of_packs(packs)


def _struck(
    spec: PPOSpec,
    policy: Policy,
    critic: Critic,
    actions: Actions,
    batch: Sequence[Trajectory],
    step: int,
    guards: Guards,
    measured: dict[str, float],
) -> bool:
    """Return whether a step whose loss or gradient is not finite is left out; each trajectory is measured by itself."""

    def measure(trajectory: Trajectory) -> dict[str, float]:
        for parameter in critic.parameters.values():
            parameter.grad = None
        found, _ = _backward(spec, policy, critic, actions, _prepared(critic, actions, [trajectory]))
        return {name: found[name] for name in ("loss", "grad_norm")}

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
