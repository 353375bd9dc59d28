"""Proximal policy optimisation with a critic, as in InstructGPT (arXiv:2203.02155), on stored trajectories.

The actions of an episode are its sampled tokens, in all its turns and histories, one chain in their order; what system,
user and tools said lies between them and is conditioned on. The reward of an action is

    r_t = - kl_coefficient KL_t + the judged reward, at the last action (credit: turns: the step rewards, each at the
                                  last action of its turn)

with KL_t of the policy before the first step to the reference. Advantages A and targets R of the values are those of
`actions`; A is then whitened over the round. The loss is the mean over tokens, by `normalization`, of

    loss of the policy (`learning`) + value_coefficient 1/2 max((V - R)², (clip(V, V_old ± value_clip) - R)²)

minus entropy_coefficient times the mean entropy, with V, V_old and R normalised by the running statistics of the
returns (`return_statistics`). The policy's gradient and the critic's own are each scaled down to max_grad_norm. The
gradient of a value head reaches the policy's adapter, and is part of the former. A new critic is first trained alone
(`value_pretraining`).

Episodes are not compared with each other, so every scored one is learned from.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from components.algorithms.loop import distributed, schedule
from components.algorithms.loop.metrics import of_packs
from components.algorithms.policy import sharded
from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy.reference_logprobs import Before
from components.algorithms.policy_gradient import losses, returns
from components.algorithms.policy_gradient.gradient_steps import take_steps
from components.algorithms.policy_gradient.training_data import (
    Packs,
    largest_log_ratio,
    learned_tokens,
    means,
    policy_loss,
)
from components.algorithms.ppo.actions import Actions, flat, token_rewards
from components.algorithms.ppo.critic import Critic
from components.algorithms.ppo.value_metrics import add_values, explained_variance
from components.algorithms.ppo.value_pretraining import pretrain
from components.algorithms.spec import PPOSpec
from components.trajectories.schema import Trajectory

FACTOR = 1.5
"""Of the adaptive coefficient: how far the KL may be from its target, and what the coefficient changes by."""


def train_ppo(
    spec: PPOSpec,
    policy: Policy,
    critic: Critic,
    optimizer: torch.optim.Optimizer,
    trajectories: Sequence[Trajectory],
    *,
    step: int,
    seed: int,
    scratch: Path,
    on_step: Callable[[dict[str, float]], None],
    taken: Sequence[dict[str, float]] = (),
    rounds: schedule.Rounds = schedule.ONLY_ROUND,
) -> tuple[int, dict[str, float]]:
    """Take `spec.epochs * spec.minibatches` gradient steps, or fewer where there are fewer groups, after
    `spec.value_pretraining_steps` of a new critic alone, and set the critic's coefficient of the KL for the next round.
    Returns the new step count, without those of the critic alone, and the mean metrics.

    optimizer: two groups of parameters, the policy's and the critic's. taken: as in `take_steps`, after those of the
    critic alone.

    Raises TrainingDiverged where a guard stops (`guards`), ArtifactError for trajectories of which the ratio cannot be
    computed.
    """
    alone = [one for one in taken if one["step"] <= step]
    taken = taken[len(alone) :]
    before: dict[str, Any] = {"alone": alone, "moved": bool(taken), "seed": seed, "on_step": on_step}
    actions, alone = prepare(spec, policy, critic, optimizer, trajectories, scratch, **before)

    def backward(part: list[Trajectory]) -> tuple[dict[str, float], dict[str, float]]:
        packs = actions.packs(part)
        return _backward(spec, policy, critic, packs, actions), of_packs([one for _, one in packs])

    rest: dict[str, Any] = {
        "outlier": partial(largest_log_ratio, policy, actions),
        "loss_scale": policy.loss_scale,
        "step": step,
        "seed": seed,
        "scratch": scratch,
        "on_step": on_step,
        "taken": taken,
        "rounds": rounds,
    }
    rates = [spec.learning_rate, spec.learning_rate * spec.value_learning_rate_ratio]
    step, metrics = take_steps(spec, optimizer, actions.groups, backward, rates=rates, **rest)
    if actions.groups:
        critic.kl_coefficient = adapted(critic.kl_coefficient, actions.kl, spec.kl_target)
        metrics |= _before_the_policy_moved(actions, alone)
    return step, metrics


def adapted(coefficient: float, kl: float, target: float | None) -> float:
    """The coefficient of the KL after a round with this KL: larger where it was far above its target, smaller where it
    was far below (arXiv:1707.06347, section 4)."""
    if target is not None and kl > FACTOR * target:
        return coefficient * FACTOR
    if target is not None and kl < target / FACTOR:
        return coefficient / FACTOR
    return coefficient


# --- before the policy moves ----------------------------------------------------------------------------------------


def prepare(
    spec: PPOSpec,
    policy: Policy,
    critic: Critic,
    optimizer: torch.optim.Optimizer,
    trajectories: Sequence[Trajectory],
    scratch: Path,
    *,
    alone: Sequence[dict[str, float]] = (),
    moved: bool = False,
    seed: int = 0,
    on_step: Callable[[dict[str, float]], None] = lambda _: None,
) -> tuple[Actions, list[dict[str, float]]]:
    """Measure what policy and critic say before the policy moves, and train a new critic alone. Returns what is learned
    from, and the metrics of the steps of the critic alone. Unscored and failed trajectories take no part, nor do those
    without a sampled token.

    alone: metrics of the steps that an earlier try took with the critic alone. moved: that try has moved the policy,
    too. After either, what was measured is read from `scratch`.
    """
    scored = [one for one in trajectories if one.reward is not None and one.failure is None]
    episodes = [one for one in scored if learned_tokens(spec, one)]
    before, begun = Before(scratch), moved or bool(alone)
    if episodes:
        measured = critic if critic.rounds else None  # a new one is measured when it is trained
        before.measure(policy, episodes, spec.pack_tokens, reference=True, first=not begun, critic=measured)
    kl = [before.kl(one, spec.kl_estimator) for one in episodes]
    rewards = [token_rewards(spec, one, own, critic.kl_coefficient) for one, own in zip(episodes, kl, strict=True)]
    if episodes and not begun:
        critic.begin_round(flat([returns.discounted_sums(each, spec.discount) for each in rewards]))
    rest: dict[str, Any] = {"padded": policy.padded, "kl": kl}
    logs = list(alone)
    if episodes and critic.rounds == 1 and not moved:
        nothing = [[0.0] * len(each) for each in rewards]
        unbiased = spec.model_copy(update={"value_gae_lambda": 1.0})
        actions = Actions(unbiased, before, episodes, rewards, nothing, critic.statistics, **rest)
        steps: dict[str, Any] = {"seed": seed, "scratch": scratch, "on_step": on_step, "taken": logs}
        logs = pretrain(spec, policy, critic, optimizer, actions, **steps)
        before.measure_values(critic, episodes, spec.pack_tokens, padded=policy.padded)
    values = [before.whole("values", one) for one in episodes]
    actions = Actions(spec, before, episodes, rewards, values, critic.statistics, **rest)
    for one in episodes:
        one.advantage = sum(actions.advantages[one.id]) / len(actions.advantages[one.id])
    return actions, logs


def _before_the_policy_moved(actions: Actions, alone: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return how good the values were that the advantages were computed with, and the seconds that the critic alone
    took."""
    sums: dict[str, float] = {}
    add_values(sums, actions.value_A, actions.return_A)
    explained = explained_variance(sums, len(actions.value_A))
    return {
        **({"explained_variance_before": explained} if math.isfinite(explained) else {}),
        **({"pretraining_seconds": sum(one["seconds"] for one in alone)} if alone else {}),
    }


# --- one gradient step ----------------------------------------------------------------------------------------------


def _backward(spec: PPOSpec, policy: Policy, critic: Critic, packs: Packs, actions: Actions) -> dict[str, float]:
    """Adds the gradient of the loss on these packs to the parameters, then scales policy and critic down to
    max_grad_norm. Returns the loss, the L2 norms before that, and what the packs say of policy and critic."""
    sums: dict[str, float] = defaultdict(float)
    count = sum(len(one.token_S) for _, one in packs)
    for (cut, given), real in distributed.share_drawing(packs):
        seen: dict[str, float] = defaultdict(float)
        one = given.to(policy.device)
        before_S, return_S, reference_S = (
            column[given.number_S].to(policy.device)
            for column in (actions.value_A, actions.return_A, actions.reference_A)
        )
        logprob_S, entropy_S, hidden_UD = policy.logprobs_and_hidden(
            one, cut, entropy_gradient=spec.entropy_coefficient > 0
        )
        loss = (policy_loss(spec, one, logprob_S, entropy_S, seen) * one.weight_S).sum()
        if spec.entropy_coefficient:
            loss = loss - spec.entropy_coefficient * entropy_S.sum() / count
        if critic.shared:
            value_S = critic.read(hidden_UD, one.row_S)
            loss = loss + _value_loss(spec, one, value_S, before_S, return_S, seen)
        policy.loss_scale.backward(loss if real else loss * 0)
        seen["loss"] += loss.item()
        if not critic.shared:
            with critic.values(one) as value_S:
                loss = _value_loss(spec, one, value_S, before_S, return_S, seen)
                policy.loss_scale.backward(loss if real else loss * 0)
            seen["loss"] += loss.item()
        seen["kl"] += losses.kl(logprob_S.detach(), reference_S, spec.kl_estimator).sum().item()
        seen["kl_k1"] += losses.kl(logprob_S.detach(), reference_S, "k1").sum().item()
        for name, value in seen.items():
            sums[name] += value if real else 0.0
    parameters = [*policy.parameters.values(), *critic.parameters.values()]
    distributed.sum_gradients(parameters)
    policy.loss_scale.unscale(parameters)
    sums = distributed.sums(sums)
    held = {"ewc": policy.add_penalty()} if policy.penalty else {}
    norms = [sharded.clip(one.parameters.values(), spec.max_grad_norm) for one in (policy, critic)]
    return {
        "loss": sums["loss"],
        "kl": sums["kl"] / max(count, 1),
        "kl_k1": sums["kl_k1"] / max(count, 1),
        "kl_coefficient": critic.kl_coefficient,
        "grad_norm": norms[0],
        "value_grad_norm": norms[1],
        **held,
        "value_loss": sums["value_loss"],
        "value_clip_fraction": sums["value_clipped"] / count,
        "explained_variance": explained_variance(sums, count),
        **means(spec, sums, count),
    }


def _value_loss(
    spec: PPOSpec,
    one: Pack,
    value_S: torch.Tensor,
    before_S: torch.Tensor,
    return_S: torch.Tensor,
    seen: dict[str, float],
) -> torch.Tensor:
    """Return the loss of a pack's values, as a part of the whole. What metrics need is added to `seen`."""
    loss = (losses.clipped_value_loss(value_S, before_S, return_S, spec.value_clip) * one.weight_S).sum()
    with torch.no_grad():
        clipped_S = losses.value_clipped(value_S, before_S, return_S, spec.value_clip)
    seen["value_loss"] += loss.item()
    seen["value_clipped"] += clipped_S.sum().item()
    add_values(seen, value_S.detach(), return_S)
    return spec.value_coefficient * loss
