"""Proximal policy optimisation with a critic, as in InstructGPT (arXiv:2203.02155), on stored trajectories.

The actions of an episode are its sampled tokens, over all turns and histories, as one chain in their order; messages of
system, user and tools lie between them as conditioning. The reward of an action is

    r_t = - kl_coefficient KL_t + the judged reward, at the last action (credit: turns: the step rewards, each at the
                                  last action of its turn)

with KL_t the KL divergence of the policy before the first gradient step from the reference. Advantages A and value
targets R are those of `actions`; A is then whitened over the round. The loss is the mean over tokens, reduced by
`normalization`, of

    policy loss (`training_data`) + value_coefficient 1/2 max((V - R)², (clip(V, V_old ± value_clip) - R)²)

minus entropy_coefficient times the mean entropy, with V, V_old and R normalised by the running statistics of the
returns (`critic`). The gradients of the policy and of the critic are each scaled down to max_grad_norm. The
gradient of a value head also reaches the policy's adapter, where it is part of the policy's gradient. A new critic is
first trained alone (`value_pretraining`).

Episodes are not compared with each other, so every scored episode is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from components.algorithms.loop import distributed
from components.algorithms.loop.epochs import StepMeasures
from components.algorithms.loop.metrics import token_counts
from components.algorithms.loop.sums import Sums
from components.algorithms.policy import sharded
from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy.reference_logprobs import ReferenceLogprobs
from components.algorithms.policy_gradient import losses, returns
from components.algorithms.policy_gradient.gradient_steps import take_steps
from components.algorithms.policy_gradient.training_data import (
    Packs,
    largest_log_ratio,
    learned_tokens,
    means,
    policy_loss,
)
from components.algorithms.ppo.actions import Actions, Measurements, flat, token_rewards
from components.algorithms.ppo.critic import ValueCritic
from components.algorithms.ppo.value_pretraining import explained_variance, pretrain, value_columns
from components.algorithms.trainer import StepMetrics, TrainingContext, TrainingResult
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.ppo.spec import PPOSpec

FACTOR = 1.5
"""Factor of the adaptive KL coefficient: tolerance of the KL divergence around its target, and size of each change."""


def train_ppo(spec: PPOSpec, context: TrainingContext) -> TrainingResult:
    """Pretrain a new critic for `spec.value_pretraining_steps`, then take `spec.epochs * spec.minibatches` gradient
    steps, or fewer if there are fewer groups. Set the critic's KL coefficient for the next round. Return the new step
    count, without the pretraining steps, and the mean metrics.

    context: its earlier steps may begin with pretraining steps.

    Raises TrainingDiverged if a guard stops the training (`guards`), ArtifactError for trajectories whose ratio cannot
    be computed.
    """
    policy, critic = context.policy, _critic(context)
    actions, pretraining_steps = prepare(spec, context)

    def backward(minibatch: Sequence[Trajectory]) -> StepMeasures:
        packs = actions.packs(minibatch)
        return _backward(spec, policy, critic, packs, actions), token_counts([planned for _, planned in packs])

    rates = [spec.learning_rate, spec.learning_rate * spec.value_learning_rate_ratio]
    policy_context = replace(
        context,
        earlier_steps=_policy_steps(context),
        on_total=lambda total: context.on_total(total + len(pretraining_steps)),
    )
    outlier = partial(largest_log_ratio, policy, actions)
    step, metrics = take_steps(spec, policy_context, actions.groups, backward, outlier, rates)
    if actions.groups:
        critic.kl_coefficient = adapted(critic.kl_coefficient, actions.kl, spec.kl_target)
        metrics |= _initial_value_metrics(actions, pretraining_steps)
    return step, metrics


def _critic(context: TrainingContext) -> ValueCritic:
    assert isinstance(context.critic, ValueCritic)
    return context.critic


def _policy_steps(context: TrainingContext) -> Sequence[StepMetrics]:
    """Return the earlier steps without the pretraining steps."""
    return [metrics for metrics in context.earlier_steps if metrics["step"] > context.step]


def adapted(coefficient: float, kl: float, target: float | None) -> float:
    """Return the KL coefficient after a round with this KL divergence: larger if it was far above its target, smaller
    if it was far below (arXiv:1707.06347, section 4)."""
    if target is not None and kl > FACTOR * target:
        return coefficient * FACTOR
    if target is not None and kl < target / FACTOR:
        return coefficient / FACTOR
    return coefficient


# --- before the first gradient step of the policy --------------------------------------------------------------------


def prepare(spec: PPOSpec, context: TrainingContext) -> tuple[Actions, list[StepMetrics]]:
    """Measure log-probabilities and values before the policy's first gradient step, and pretrain a new critic. Return
    the training data, and the metrics of the pretraining steps. Unscored and failed trajectories and those without a
    sampled token are ignored.

    If an interrupted run took steps, the measurements are read from its scratch folder."""
    policy, critic = context.policy, _critic(context)
    scored = [episode for episode in context.trajectories if episode.reward is not None and episode.failure is None]
    episodes = [episode for episode in scored if learned_tokens(spec, episode)]
    before, resumed = ReferenceLogprobs(context.scratch), bool(context.earlier_steps)
    policy_resumed = bool(_policy_steps(context))
    if episodes:
        measured_critic = critic if critic.rounds else None  # a new critic is measured after its pretraining
        before.measure(policy, episodes, spec.pack_size, reference=True, first=not resumed, critic=measured_critic)
    kl = [before.kl(episode, spec.kl_estimator) for episode in episodes]
    rewards = [
        token_rewards(spec, episode, episode_kl, critic.kl_coefficient)
        for episode, episode_kl in zip(episodes, kl, strict=True)
    ]
    if episodes and not resumed:
        critic.begin_round(
            flat([returns.discounted_sums(episode_rewards, spec.discount) for episode_rewards in rewards])
        )
    logs = [metrics for metrics in context.earlier_steps if metrics["step"] <= context.step]
    if episodes and critic.rounds == 1 and not policy_resumed:
        zeros = [[0.0] * len(episode_rewards) for episode_rewards in rewards]
        unbiased = spec.model_copy(update={"value_gae_lambda": 1.0})
        measured = Measurements(before, rewards, zeros, kl, critic.statistics)
        actions = Actions(unbiased, episodes, measured, padded=policy.padded)
        logs = pretrain(spec, replace(context, earlier_steps=logs), critic, actions)
        before.measure_values(critic, episodes, spec.pack_size, padded=policy.padded)
    values = [before.whole("values", episode) for episode in episodes]
    measured = Measurements(before, rewards, values, kl, critic.statistics)
    actions = Actions(spec, episodes, measured, padded=policy.padded)
    for episode in episodes:
        episode.advantage = sum(actions.advantages[episode.id]) / len(actions.advantages[episode.id])
    return actions, logs


def _initial_value_metrics(actions: Actions, pretraining_steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the explained variance of the values that the advantages were computed with, and the duration of the
    pretraining."""
    sums = {name: column.sum().item() for name, column in value_columns(actions.value_A, actions.return_A).items()}
    explained = explained_variance(sums, len(actions.value_A))
    return {
        **({"explained_variance_before": explained} if math.isfinite(explained) else {}),
        **({"pretraining_seconds": sum(step["seconds"] for step in pretraining_steps)} if pretraining_steps else {}),
    }


# --- one gradient step ----------------------------------------------------------------------------------------------


def _backward(spec: PPOSpec, policy: Policy, critic: ValueCritic, packs: Packs, actions: Actions) -> dict[str, float]:
    """Add the gradient of the loss on these packs to the parameters and scale policy and critic down to max_grad_norm.
    Return the loss, the L2 norms before scaling, and the metrics of policy and critic on the packs."""
    sums, count = Sums(), sum(planned.sampled for _, planned in packs)
    for (cut, planned), real in distributed.share_with_dropout(packs):
        host_pack = planned.lay_out()
        pack = host_pack.to(policy.device)
        before_S, return_S, reference_S = (
            column[host_pack.number_S].to(policy.device)
            for column in (actions.value_A, actions.return_A, actions.reference_A)
        )
        logprob_S, entropy_S, hidden_UD = policy.logprobs_and_hidden(
            pack, cut, entropy_gradient=spec.entropy_coefficient > 0
        )
        loss_S, columns = policy_loss(spec, pack, logprob_S, entropy_S)
        loss = (loss_S * pack.weight_S).sum()
        if spec.entropy_coefficient:
            loss = loss - spec.entropy_coefficient * entropy_S.sum() / count
        if critic.shared:
            value_S = critic.read(hidden_UD, pack.row_S)
            loss = loss + _value_loss(spec, pack, value_S, before_S, return_S, sums, real=real)
        policy.loss_scale.backward(loss if real else loss * 0)
        sums.add({"loss": loss}, real=real)
        if not critic.shared:
            with critic.values(pack) as value_S:
                loss = _value_loss(spec, pack, value_S, before_S, return_S, sums, real=real)
                policy.loss_scale.backward(loss if real else loss * 0)
            sums.add({"loss": loss}, real=real)
        kl = {"kl": spec.kl_estimator, "kl_k1": "k1"}
        columns |= {name: losses.kl(logprob_S.detach(), reference_S, estimator) for name, estimator in kl.items()}
        sums.add(columns, real=real)
    parameters = [*policy.parameters.values(), *critic.parameters.values()]
    distributed.sum_gradients(parameters)
    policy.loss_scale.unscale(parameters)
    penalty = {"ewc": policy.add_penalty()} if policy.penalty else {}
    norms = [sharded.clip(model.parameters.values(), spec.max_grad_norm) for model in (policy, critic)]
    totals = sums.totals()
    return {
        "loss": totals["loss"],
        "kl": totals["kl"] / max(count, 1),
        "kl_k1": totals["kl_k1"] / max(count, 1),
        "kl_coefficient": critic.kl_coefficient,
        "grad_norm": float(norms[0]),
        "value_grad_norm": float(norms[1]),
        **penalty,
        "value_loss": totals["value_loss"],
        "value_clip_fraction": totals["value_clipped"] / count,
        "explained_variance": explained_variance(totals, count),
        **means(spec, totals, count),
    }


def _value_loss(
    spec: PPOSpec,
    pack: Pack,
    value_S: torch.Tensor,
    before_S: torch.Tensor,
    return_S: torch.Tensor,
    sums: Sums,
    *,
    real: bool,
) -> torch.Tensor:
    """Return the contribution of a pack to the value loss. The sums of its metrics are added to `sums`."""
    loss = (losses.clipped_value_loss(value_S, before_S, return_S, spec.value_clip) * pack.weight_S).sum()
    with torch.no_grad():
        clipped_S = losses.value_clipped(value_S, before_S, return_S, spec.value_clip)
    sums.add({"value_loss": loss}, real=real)
    sums.add({"value_clipped": clipped_S, **value_columns(value_S, return_S)}, real=real)
    return spec.value_coefficient * loss
