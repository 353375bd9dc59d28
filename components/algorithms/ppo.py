"""Proximal policy optimisation with a critic, as in InstructGPT (arXiv:2203.02155), on stored trajectories.

The actions of an episode are its sampled tokens, in all its turns and histories, one chain in their order; what system,
user and tools said lies between them and is conditioned on. The reward of an action is

    r_t = - kl_coefficient KL_t + the judged reward, at the last action (credit: turns: the step rewards, each at the
                                  last action of its turn)

with KL_t of the policy before the first step to the reference. Advantages A are those of `gae`, the target of a value
is R = A + V_old, and A is then whitened over the round. The loss is the mean over tokens, by `normalization`, of

    loss of the policy (`learning`) + value_coefficient 1/2 max((V - R)², (clip(V, V_old ± value_clip) - R)²)

minus entropy_coefficient times the mean entropy. The policy's gradient and the critic's own are each scaled down to
max_grad_norm. The gradient of a value head reaches the policy's adapter, and is part of the former.

Episodes are not compared with each other, so every scored one is learned from.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from components.algorithms import advantages, distributed, losses, returns, schedule, sharded
from components.algorithms.before import Before
from components.algorithms.critic import Critic
from components.algorithms.gae import gae
from components.algorithms.learning import Learning, Packs, largest_log_ratio, learned_tokens, means, policy_loss
from components.algorithms.metrics import of_packs
from components.algorithms.packing import Pack
from components.algorithms.policy import Policy
from components.algorithms.spec import PPOSpec
from components.algorithms.steps import Group, take_steps
from components.trajectories.groups import by_scenario
from components.trajectories.schema import Trajectory

FACTOR = 1.5
"""Of the adaptive coefficient: how far the KL may be from its target, and what the coefficient changes by."""

SPREAD = 1e-12
"""Variance of returns below which there is nothing to explain."""


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
    """Takes `spec.epochs * spec.minibatches` gradient steps, or fewer where there are fewer groups, and sets the
    critic's coefficient of the KL for the next round. Returns the new step count and the mean metrics.

    optimizer: two groups of parameters, the policy's and the critic's. taken: as in `take_steps`.

    Raises TrainingDiverged where a guard stops (`guards`), ArtifactError for trajectories of which the ratio cannot be
    computed.
    """
    actions = prepare(spec, policy, critic, trajectories, scratch, first=not taken)

    def backward(part: list[Trajectory]) -> tuple[dict[str, float], dict[str, float]]:
        packs = actions.packs(part)
        return _backward(spec, policy, critic, packs, actions), of_packs([one for _, one in packs])

    rest: dict[str, Any] = {
        "outlier": partial(largest_log_ratio, policy, actions),
        "step": step,
        "seed": seed,
        "scratch": scratch,
        "on_step": on_step,
        "taken": taken,
        "rounds": rounds,
    }
    rates = [spec.learning_rate, spec.value_learning_rate or spec.learning_rate]
    step, metrics = take_steps(spec, optimizer, actions.groups, backward, rates=rates, **rest)
    if actions.groups:
        critic.kl_coefficient = adapted(critic.kl_coefficient, actions.kl, spec.kl_target)
    return step, metrics


def adapted(coefficient: float, kl: float, target: float | None) -> float:
    """The coefficient of the KL after a round with this KL: larger where it was far above its target, smaller where it
    was far below (arXiv:1707.06347, section 4)."""
    if target is not None and kl > FACTOR * target:
        return coefficient * FACTOR
    if target is not None and kl < target / FACTOR:
        return coefficient / FACTOR
    return coefficient


# --- what is learned from -------------------------------------------------------------------------------------------


class Actions(Learning):
    """The A sampled tokens of a round's episodes, with columns of their own. Packs carry the number of each."""

    def __init__(
        self, spec: PPOSpec, before: Before, episodes: Sequence[Trajectory], coefficient: float, *, padded: bool = False
    ):
        super().__init__(spec, before, padded=padded)
        self.groups: list[Group] = list(by_scenario(episodes).values())
        kl = [before.kl(one, spec.kl_estimator) for one in episodes]
        values = [before.whole("values", one) for one in episodes]
        found = [
            gae(_rewards(spec, one, own, coefficient), each, spec.discount, spec.gae_lambda)
            for one, own, each in zip(episodes, kl, values, strict=True)
        ]
        used = advantages.advantages([found], baseline="batch", scale="batch")[0] if spec.whiten else found
        self.advantages = {one.id: each for one, each in zip(episodes, used, strict=True)}
        self.value_A, self.reference_A = (
            _flat(column) for column in (values, [before.whole("reference", one) for one in episodes])
        )
        self.return_A = _flat(found) + self.value_A
        self.kl = float(_flat(kl).mean()) if episodes else 0.0
        """Of the policy before the first step to the reference, nats a token."""
        ends = accumulate(len(each) for each in values)
        self.first = {one.id: end - len(each) for one, each, end in zip(episodes, values, ends, strict=True)}


def prepare(
    spec: PPOSpec,
    policy: Policy,
    critic: Critic,
    trajectories: Sequence[Trajectory],
    scratch: Path,
    *,
    first: bool = True,
) -> Actions:
    """What is learned from. Unscored and failed trajectories take no part, nor do those without a sampled token.

    first: policy and critic are those before the first gradient step; else what they said then is read from `scratch`.
    """
    scored = [one for one in trajectories if one.reward is not None and one.failure is None]
    episodes = [one for one in scored if learned_tokens(spec, one)]
    before = Before(scratch)
    if episodes:
        before.measure(policy, episodes, spec.pack_tokens, reference=True, first=first, critic=critic)
    actions = Actions(spec, before, episodes, critic.kl_coefficient, padded=policy.padded)
    for one in episodes:
        one.advantage = sum(actions.advantages[one.id]) / len(actions.advantages[one.id])
    return actions


def _rewards(spec: PPOSpec, trajectory: Trajectory, kl: Sequence[float], coefficient: float) -> list[float]:
    """(A,) reward of each action of an episode."""
    lengths = returns.turn_lengths(trajectory)
    if spec.credit == "turns":
        given = returns.turn_rewards(trajectory)
    else:
        given, lengths = [trajectory.reward or 0.0], [sum(lengths)]
    if spec.overlong:
        given[-1] += spec.overlong_penalty * returns.overlong(sum(lengths), spec.overlong, spec.overlong_buffer)
    by_token = returns.token_rewards(given, lengths)
    return [reward - coefficient * own for reward, own in zip(by_token, kl, strict=True)]


def _flat(column: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([value for each in column for value in each])


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
        (loss if real else loss * 0).backward()
        seen["loss"] += loss.item()
        if not critic.shared:
            with critic.values(one) as value_S:
                loss = _value_loss(spec, one, value_S, before_S, return_S, seen)
                (loss if real else loss * 0).backward()
            seen["loss"] += loss.item()
        seen["kl"] += losses.kl(logprob_S.detach(), reference_S, spec.kl_estimator).sum().item()
        seen["kl_k1"] += losses.kl(logprob_S.detach(), reference_S, "k1").sum().item()
        for name, value in seen.items():
            sums[name] += value if real else 0.0
    distributed.sum_gradients([*policy.parameters.values(), *critic.parameters.values()])
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
        **_of_values(sums, count),
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
    """The loss of a pack's values, as a part of the whole. What `_of_values` reads is added to `seen`."""
    loss = (losses.clipped_value_loss(value_S, before_S, return_S, spec.value_clip) * one.weight_S).sum()
    with torch.no_grad():
        clipped_S = losses.value_clipped(value_S, before_S, return_S, spec.value_clip)
        error_S, return_S = (return_S - value_S).double(), return_S.double()
    seen["value_loss"] += loss.item()
    seen["value_clipped"] += clipped_S.sum().item()
    for name, each_S in (("errors", error_S), ("returns", return_S)):
        seen[name] += each_S.sum().item()
        seen[f"{name} squared"] += each_S.square().sum().item()
    return spec.value_coefficient * loss


def _of_values(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """Metrics of a step's values. explained_variance is 1 - Var(R - V) / Var(R): 1 where values are what comes, 0 where
    they say no more than its mean; no number where everything comes to the same."""

    def variance(name: str) -> float:
        return sums[f"{name} squared"] / count - (sums[name] / count) ** 2

    spread = variance("returns")
    return {
        "value_loss": sums["value_loss"],
        "value_clip_fraction": sums["value_clipped"] / count,
        "explained_variance": 1 - variance("errors") / spread if spread > SPREAD else math.nan,
    }
