"""Policy gradient on stored trajectories: GRPO (arXiv:2402.03300) and its variants, which are settings of it (`spec`).

For each sampled token, with the ratio r of the policy to the policy that sampled it, its advantage A and weight w, the
loss is the mean, reduced by `normalization`, of

    -w min(r A, clip(r, 1 - low, 1 + high) A) + kl_coefficient KL(policy || reference)     objective: clip
    -w sg(clip(r, 1 - low, 1 + high)) A log pi + kl_coefficient KL(policy || reference)    objective: cispo

minus entropy_coefficient times the mean entropy. The KL term is part of the loss with `kl_in: loss` only; otherwise the
penalty is subtracted from the reward, and so part of A (`_penalty`, `returns.subtract_kl`). w is 1, or corrects for an
engine whose log-probabilities differ from the trainer's.

Sampled tokens and their log-probabilities are read from the trajectories; nothing is tokenized again. Trajectories that
share a prefix share its computation (`packing`). Groups without spread contribute nothing; a batch of only such groups
leaves the adapter and the optimizer unchanged, byte for byte.

The guard `amplified_rewards` reads what `algorithm.scale` divides by (`scaling_metrics`): dividing by the standard
deviation gives a group whose returns hardly differ the same weight as a group with failures and successes (the
difficulty bias of Dr. GRPO, arXiv:2503.20783, section 3.1): a length penalty of 0.001 among equal rewards becomes an
advantage of about 1. Compared with the range of rewards, the divisor says by how much.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from components.algorithms.loop import distributed
from components.algorithms.loop.epochs import StepMeasures
from components.algorithms.loop.metrics import token_counts
from components.algorithms.loop.sums import Sums
from components.algorithms.policy import sharded
from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy.reference_logprobs import ReferenceLogprobs
from components.algorithms.policy_gradient import advantages, losses, returns
from components.algorithms.policy_gradient.gradient_steps import Group, take_steps
from components.algorithms.policy_gradient.training_data import (
    Learning,
    Packs,
    largest_log_ratio,
    learned_tokens,
    means,
    needs_old_logprobs,
    policy_loss,
)
from components.algorithms.trainer import TrainingContext, TrainingResult
from components.models.distribution import Cut
from components.trajectories.groups import by_scenario, have_spread
from components.trajectories.roles import role_names, role_turns
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.policy_gradient.advantages import Scale
    from components.algorithms.policy_gradient.spec import GRPOSpec

KL_SAMPLE = 8
"""Smallest number of sequences per gradient step on which the KL divergence from the reference is measured if it is not
in the loss: those of whole packs."""


def train_policy_gradient(spec: GRPOSpec, context: TrainingContext) -> TrainingResult:
    """Take `spec.epochs * spec.minibatches` gradient steps, or fewer if fewer groups carry signal. Return the new step
    count and the mean metrics.

    Raises TrainingDiverged if a guard stops the training (`guards`), ArtifactError for trajectories whose ratio cannot
    be computed.
    """
    policy = context.policy
    groups, learning = prepare(spec, context)

    def backward(minibatch: Sequence[Trajectory]) -> StepMeasures:
        packs = learning.packs(minibatch)
        draw = random.Random(f"{context.seed}-{''.join(trajectory.id for trajectory in minibatch)}")
        measured = _drawn(packs, draw) if spec.measure_kl else ()
        return _backward(spec, policy, packs, measured), token_counts([planned for _, planned in packs])

    outlier = partial(largest_log_ratio, policy, learning)
    step, metrics = take_steps(spec, context, groups, backward, outlier, [spec.learning_rate])
    return step, metrics if metrics.get("skipped") else metrics | learning.scaling


def prepare(spec: GRPOSpec, context: TrainingContext) -> tuple[list[Group], Learning]:
    """Return the groups that carry signal, and their training data. Unscored and failed trajectories are ignored.

    If an interrupted run took gradient steps, the log-probabilities from before the first one are read from its scratch
    folder."""
    policy = context.policy
    scored = [
        trajectory
        for trajectory in context.trajectories
        if trajectory.reward is not None and trajectory.failure is None
    ]
    before = ReferenceLogprobs(context.scratch)
    kl_in_reward = spec.kl_coefficient > 0 and spec.kl_in != "loss"
    if kl_in_reward or needs_old_logprobs(spec):
        first = not context.earlier_steps
        before.measure(policy, scored, spec.pack_size, reference=kl_in_reward, first=first)
    learning = Learning(spec, before, padded=policy.padded, by_role=policy.by_role)
    groups = list(by_scenario(scored).values())
    if spec.credit == "episode" and not (spec.kl_coefficient and spec.kl_in == "token_rewards"):
        totals = [[_total(spec, trajectory, before) for trajectory in group] for group in groups]
        learning.scaling = scaling_metrics(totals, spec.scale)
    informative = []
    for group, group_values in zip(groups, _advantages(spec, groups, before), strict=True):
        for trajectory, values in zip(group, group_values, strict=True):
            token_advantages = _by_token(spec, trajectory, values)
            learning.advantages[trajectory.id] = token_advantages
            trajectory.advantage = (
                sum(token_advantages) / len(token_advantages) if token_advantages else values[0] if values else 0.0
            )
        if any(any(values) for values in group_values) and any(
            learned_tokens(spec, trajectory) for trajectory in group
        ):
            informative.append(group)
    return informative, learning


def _advantages(spec: GRPOSpec, groups: Sequence[Group], before: ReferenceLogprobs) -> list[advantages.Returns]:
    """Return the advantages of each episode of each group: one per episode, role, turn or sampled token."""
    normalisation: dict[str, Any] = {"baseline": spec.baseline, "scale": spec.scale}
    if spec.credit == "roles":
        by_role_G = [[returns.role_rewards(trajectory) for trajectory in group] for group in groups]
        rewards_G = [[list(rewards.values()) for rewards in group] for group in by_role_G]
        roles_G = [[list(rewards) for rewards in group] for group in by_role_G]
        return advantages.advantages(rewards_G, **normalisation, cells=roles_G)
    returns_G = [[_returns(spec, trajectory, before) for trajectory in group] for group in groups]
    if spec.kl_coefficient and spec.kl_in == "token_rewards":
        return advantages.advantages(returns_G, **normalisation, cells=_token_cells(spec, groups))
    if spec.credit == "episode":
        return advantages.advantages(returns_G, **normalisation)
    if spec.turn_baseline == "process":
        return advantages.process_advantages(returns_G, **normalisation, discount=spec.discount)
    totals_G = [[_total(spec, trajectory, before) for trajectory in group] for group in groups]
    turn_options: dict[str, Any] = {"turn_baseline": spec.turn_baseline, "state_weight": spec.state_weight}
    return advantages.turn_advantages(returns_G, totals_G, groups, **normalisation, **turn_options)


def _returns(spec: GRPOSpec, trajectory: Trajectory, before: ReferenceLogprobs) -> list[float]:
    """Return the returns of an episode: one for the episode, per turn or per sampled token; with `turn_baseline:
    process`, the step rewards."""
    rewards = _rewards(spec, trajectory)
    lengths = returns.turn_lengths(trajectory)
    if spec.credit == "episode":
        lengths = [sum(lengths)]
    elif spec.turn_baseline != "process":
        rewards = returns.discounted_sums(rewards, spec.discount)
    if spec.kl_coefficient and spec.kl_in == "token_rewards":
        return returns.subtract_kl(rewards, lengths, before.kl(trajectory, spec.kl_estimator), spec.kl_coefficient)
    penalty = _penalty(spec, trajectory, before)
    return [value - penalty for value in rewards]


def _total(spec: GRPOSpec, trajectory: Trajectory, before: ReferenceLogprobs) -> float:
    """Return the undiscounted total return of an episode, from its step rewards."""
    return sum(_rewards(spec, trajectory)) - _penalty(spec, trajectory, before)


def _rewards(spec: GRPOSpec, trajectory: Trajectory) -> list[float]:
    """Return the judged reward, or with `credit: turns` the step rewards. The length penalty is added to the last one,
    so that it affects the return of every turn."""
    rewards = [trajectory.reward or 0.0] if spec.credit == "episode" else returns.turn_rewards(trajectory)
    if spec.overlong and rewards:
        tokens = sum(returns.turn_lengths(trajectory))
        rewards[-1] += spec.overlong_penalty * returns.overlong(tokens, spec.overlong, spec.overlong_buffer)
    return rewards


def _penalty(spec: GRPOSpec, trajectory: Trajectory, before: ReferenceLogprobs) -> float:
    """Return the KL penalty that is subtracted from the reward of the whole episode."""
    if not spec.kl_coefficient or spec.kl_in != "reward":
        return 0.0
    return spec.kl_coefficient * sum(before.kl(trajectory, spec.kl_estimator))


def _token_cells(spec: GRPOSpec, groups: Sequence[Group]) -> list[list[list[Hashable]]]:
    """Return the cell of each sampled token, for token returns: its turn with `credit: turns`, else one cell for all
    tokens.

    If a cell contains tokens of a single compared episode, each of its tokens gets its own cell: within one episode
    token returns differ only by the KL penalty, which the scale would blow up to a standard deviation of 1.
    """
    turn_cells = [[_turns_of_tokens(spec, trajectory) for trajectory in group] for group in groups]
    in_group = spec.baseline in ("group", "leave_one_out")
    in_batch = Counter(cell for group in turn_cells for token_turns in group for cell in set(token_turns))
    cells: list[list[list[Hashable]]] = []
    for group in turn_cells:
        episodes = Counter(cell for token_turns in group for cell in set(token_turns)) if in_group else in_batch
        cells.append(
            [
                [cell if episodes[cell] > 1 else (cell, index) for index, cell in enumerate(token_turns)]
                for token_turns in group
            ]
        )
    return cells


def _turns_of_tokens(spec: GRPOSpec, trajectory: Trajectory) -> list[int]:
    lengths = returns.turn_lengths(trajectory)
    return [turn if spec.credit == "turns" else 0 for turn, length in enumerate(lengths) for _ in range(length)]


def _by_token(spec: GRPOSpec, trajectory: Trajectory, values: list[float]) -> list[float]:
    """Return the advantage of each sampled token from those of the episode, its roles, its turns or its tokens."""
    lengths = returns.turn_lengths(trajectory)
    if spec.credit == "roles":
        by_role = dict(zip(role_names(trajectory), values, strict=True))
        values = [by_role[role] for role in role_turns(trajectory)]
    if spec.kl_coefficient and spec.kl_in == "token_rewards":
        return values
    if spec.credit == "episode":
        return values * sum(lengths)
    return [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]


def _backward(spec: GRPOSpec, policy: Policy, packs: Packs, measured: Collection[int] = ()) -> dict[str, float]:
    """Add the gradient of the loss on these packs to the parameters and scale it down to max_grad_norm. Return the
    loss, the L2 norm before scaling, and the metrics of the policy on the packs. measured: see `add_gradient`."""
    count = sum(planned.sampled for _, planned in packs)
    sums = add_gradient(spec, policy, packs, count, measured)
    penalty = {"ewc": policy.add_penalty()} if policy.penalty else {}
    norm = sharded.clip(policy.parameters.values(), spec.max_grad_norm)
    totals = sums.totals()
    kl = {name: totals[name] / totals["kl_tokens"] for name in ("kl", "kl_k1") if name in totals}
    return {"loss": totals["loss"], "grad_norm": float(norm), **penalty, **kl, **means(spec, totals, count)}


def _drawn(packs: Packs, draw: random.Random) -> frozenset[int]:
    """Return the places in the order of computation, the same in all processes, of random packs with at least
    `KL_SAMPLE` sequences in all."""
    places = list(range(-(-len(packs) // distributed.size())))
    draw.shuffle(places)
    sequences = 0
    for number, place in enumerate(places, 1):
        together = packs[place * distributed.size() : (place + 1) * distributed.size()]
        sequences += sum(len(planned.ordered) for _, planned in together)
        if sequences >= KL_SAMPLE:
            return frozenset(places[:number])
    return frozenset(places)


def add_gradient(spec: GRPOSpec, policy: Policy, packs: Packs, count: int, measured: Collection[int] = ()) -> Sums:
    """Add the gradient of the loss on these packs to the parameters. Return the sums of loss and metrics.

    count: number of tokens of the batch, over which the entropy is averaged. measured: places of the packs on which the
    KL divergence from the reference is measured if it is not in the loss."""
    sums, kl_in_loss = Sums(), spec.kl_coefficient > 0 and spec.kl_in == "loss"
    for place, ((cut, planned), real) in enumerate(distributed.share_with_dropout(packs)):
        pack = planned.lay_out().to(policy.device)
        logprob_S, entropy_S = policy.logprobs(pack, cut, entropy_gradient=spec.entropy_coefficient > 0)
        loss_S, columns = policy_loss(spec, pack, logprob_S, entropy_S)
        if kl_in_loss:
            kl_S, kl_columns = _kl(spec, policy, pack, cut, logprob_S)
            sums.add(kl_columns, real=real)
            loss_S = loss_S + spec.kl_coefficient * kl_S
        loss = (loss_S * pack.weight_S).sum()
        if spec.entropy_coefficient:
            loss = loss - spec.entropy_coefficient * entropy_S.sum() / count
        policy.loss_scale.backward(loss if real else loss * 0)
        sums.add({"loss": loss}, real=real)
        sums.add(columns, real=real)
        if place in measured and not kl_in_loss:
            sums.add(_kl(spec, policy, pack, cut, logprob_S.detach())[1], real=real)
    distributed.sum_gradients(policy.parameters.values())
    policy.loss_scale.unscale(policy.parameters.values())
    return sums


def _kl(
    spec: GRPOSpec, policy: Policy, pack: Pack, cut: Cut, logprob_S: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the (S,) estimates of the KL divergence from the reference, and the columns of its metrics."""
    with policy.as_reference():
        reference_S, _ = policy.logprobs(pack, cut)
    kl_S = losses.kl(logprob_S, reference_S, spec.kl_estimator)
    k1_S = losses.kl(logprob_S.detach(), reference_S, "k1")
    return kl_S, {"kl": kl_S, "kl_k1": k1_S, "kl_tokens": torch.ones_like(k1_S)}


DIVISOR, RANGE = "advantage_divisor", "reward_range"
"""Metrics: the divisor that at least a tenth of the groups do not exceed, and the range of all returns."""
SHARE = 0.1
"""Share of the groups with spread that have at most the divisor of the metric."""


def scaling_metrics(returns_G: Sequence[Sequence[float]], scale: Scale) -> dict[str, float]:
    """Return the metrics of the returns of episodes, by group; none if nothing is divided.

    Groups without spread have advantages of 0, so they do not count."""
    returns = list(chain(*returns_G))
    compared = {"group": returns_G, "batch": [returns], "none": []}[scale]
    divisors = sorted(statistics.pstdev(values) for values in compared if have_spread(values))
    if not divisors:
        return {}
    return {DIVISOR: divisors[math.ceil(SHARE * len(divisors)) - 1], RANGE: max(returns) - min(returns)}
