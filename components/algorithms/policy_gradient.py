"""Policy gradient on stored trajectories: GRPO (arXiv:2402.03300) and its kin, which are settings of it (`spec`).

For each sampled token, with the ratio r of the policy to the one that sampled it, its advantage A and weight w, the
loss is the mean, by `normalization`, of

    -w min(r A, clip(r, 1 - low, 1 + high) A) + kl_coefficient KL(policy || reference)     objective: clip
    -w sg(clip(r, 1 - low, 1 + high)) A log pi + kl_coefficient KL(policy || reference)    objective: cispo

minus entropy_coefficient times the mean entropy. w is 1, or corrects for an engine that computes other
log-probabilities than we do.

Sampled tokens and their log-probabilities come from the trajectories as they were drawn; nothing is tokenised again.
Trajectories that share a prefix share its computation (`packing`). Groups without spread contribute nothing; a batch
of only such groups leaves the adapter and the optimizer as they are, byte for byte.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from components.algorithms import advantages, losses, returns
from components.algorithms.before import Before
from components.algorithms.guards import Guards
from components.algorithms.metrics import over_steps
from components.algorithms.packing import Pack, Sequence_, pack
from components.algorithms.policy import Policy
from components.algorithms.spec import GRPOSpec
from components.models.distribution import Cut
from components.trajectories.groups import by_scenario
from components.trajectories.schema import Trajectory

Group = list[Trajectory]


def train_policy_gradient(
    spec: GRPOSpec,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    trajectories: Sequence[Trajectory],
    *,
    step: int,
    seed: int,
    scratch: Path,
    on_step: Callable[[dict[str, float]], None],
    taken: Sequence[dict[str, float]] = (),
) -> tuple[int, dict[str, float]]:
    """Takes `spec.epochs * spec.minibatches` gradient steps, or fewer where fewer groups carry signal. Returns the new
    step count and the mean metrics.

    taken: metrics of the steps that an earlier try took after step `step`; policy and optimizer are those after them.

    Raises TrainingDiverged where a guard stops (`guards`), ArtifactError for trajectories of which the ratio cannot be
    computed.
    """
    guards = Guards(scratch)
    groups, learning = prepare(spec, policy, trajectories, scratch, first=not taken)
    logs = list(taken)
    for number, part in enumerate(_batches(groups, spec, seed, step), start=step + 1):
        if number <= step + len(taken):
            continue
        _set_learning_rate(optimizer, spec, number)
        metrics = {"step": float(number), **_gradient_step(spec, policy, optimizer, part, learning, number, guards)}
        logs.append(metrics)
        on_step(metrics)
    return step + len(logs), over_steps(logs)


# --- what is learned from -------------------------------------------------------------------------------------------


class Learning:
    """What the loss needs to know of each trajectory: the advantage of each of its sampled tokens, and what two other
    policies say of them."""

    def __init__(self, spec: GRPOSpec, before: Before):
        self.spec = spec
        self.before = before
        self.advantages: dict[str, list[float]] = {}
        """By trajectory; of its sampled tokens, over all histories."""

    def tokens(self, trajectory: Trajectory) -> int:
        """How many tokens are learned from."""
        return 0 if self.spec.mask_truncated and _truncated(trajectory) else _sampled_tokens(trajectory)

    def sequences(self, trajectories: Sequence[Trajectory]) -> list[list[Sequence_]]:
        """The histories of each trajectory."""
        learned = [self.tokens(trajectory) for trajectory in trajectories]
        total, taking_part = sum(learned), sum(own > 0 for own in learned)
        made: list[list[Sequence_]] = []
        for trajectory, own in zip(trajectories, learned, strict=True):
            made.append([])
            if not own:
                continue
            weight = {
                "tokens": 1 / total,
                "sequences": 1 / (own * taking_part),
                "constant": 1 / (self.spec.constant_length * taking_part),
            }[self.spec.normalization]
            given = iter(self.advantages[trajectory.id])
            for place, history in enumerate(trajectory.histories):
                targets = [index for index, is_sampled in enumerate(history.sampled_mask()) if is_sampled]
                old, _ = self.before.of(trajectory, place)
                made[-1].append(
                    Sequence_(
                        history.token_ids,
                        targets,
                        [history.logprobs[index] for index in targets],
                        [next(given) for _ in targets],
                        weight,
                        old,
                    )
                )
        return made


def prepare(
    spec: GRPOSpec, policy: Policy, trajectories: Sequence[Trajectory], scratch: Path, *, first: bool = True
) -> tuple[list[Group], Learning]:
    """The groups that carry signal, and what is learned from them. Unscored and failed trajectories take no part.

    first: the policy is the one before the first gradient step; else what it said then is read from `scratch`.
    """
    scored = [one for one in trajectories if one.reward is not None and one.failure is None]
    before = Before(scratch)
    kl_in_reward = spec.kl_coefficient > 0 and spec.kl_in != "loss"
    if kl_in_reward or spec.correction != "none":
        before.measure(policy, scored, spec.pack_tokens, reference=kl_in_reward, first=first)
    learning = Learning(spec, before)
    groups = list(by_scenario(scored).values())
    of_groups = [[_returns(spec, one, before) for one in group] for group in groups]
    found = advantages.advantages(of_groups, baseline=spec.baseline, scale=spec.scale)
    kept = []
    for group, each in zip(groups, found, strict=True):
        for trajectory, values in zip(group, each, strict=True):
            by_token = _by_token(trajectory, values)
            learning.advantages[trajectory.id] = by_token
            trajectory.advantage = sum(by_token) / len(by_token) if by_token else values[0] if values else 0.0
        if any(any(values) for values in each) and any(learning.tokens(trajectory) for trajectory in group):
            kept.append(group)
    return kept, learning


def _returns(spec: GRPOSpec, trajectory: Trajectory, before: Before) -> list[float]:
    """One for the episode, one for each turn, or one for each sampled token."""
    lengths = returns.turn_lengths(trajectory)
    longer = returns.overlong(sum(lengths), spec.overlong, spec.overlong_buffer) if spec.overlong else 0.0
    if spec.credit == "turns":
        found = returns.turn_returns(trajectory, spec.discount)
        if found:
            found[-1] += spec.overlong_penalty * longer
    else:
        found, lengths = [(trajectory.reward or 0.0) + spec.overlong_penalty * longer], [sum(lengths)]
    if not spec.kl_coefficient or spec.kl_in == "loss":
        return found
    kl = before.kl(trajectory, spec.kl_estimator)
    if spec.kl_in == "token_rewards":
        return returns.penalised(found, lengths, kl, spec.kl_coefficient)
    return [value - spec.kl_coefficient * sum(kl) for value in found]


def _by_token(trajectory: Trajectory, values: list[float]) -> list[float]:
    """Advantages of the episode, its turns or its tokens, as those of its sampled tokens."""
    lengths = returns.turn_lengths(trajectory)
    tokens = sum(lengths)
    if len(values) == tokens:
        return values
    if len(values) == 1:
        return values * tokens
    return [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]


def _sampled_tokens(trajectory: Trajectory) -> int:
    return sum(sum(history.sampled_mask()) for history in trajectory.histories)


def _truncated(trajectory: Trajectory) -> bool:
    return any(message.finish_reason == "length" for history in trajectory.histories for message in history.messages)


def _batches(groups: list[Group], spec: GRPOSpec, seed: int, step: int) -> Iterator[list[Group]]:
    """The groups of each gradient step after step `step`: each epoch in an order of its own."""
    for epoch in range(spec.epochs):
        order = list(groups)
        random.Random(f"{seed}-{step}-{epoch}").shuffle(order)
        for part in _parts(order, spec.minibatches):
            step += 1
            yield part


def _parts(groups: list[Group], count: int) -> list[list[Group]]:
    """Groups dealt out to minibatches of nearly equal size; empty ones are left out."""
    return [part for part in (groups[index::count] for index in range(count)) if part]


# --- one gradient step ----------------------------------------------------------------------------------------------


def _gradient_step(
    spec: GRPOSpec,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: list[Group],
    learning: Learning,
    step: int,
    guards: Guards,
) -> dict[str, float]:
    started = time.monotonic()
    trajectories = [trajectory for group in groups for trajectory in group]
    packs = _packs(trajectories, learning)
    measured = _backward(spec, policy, packs)
    if skipped := _struck(spec, policy, measured, trajectories, learning, step, guards):
        optimizer.zero_grad(set_to_none=True)
    else:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = time.monotonic() - started
    tokens = sum(sum(one.lengths) for _, one in packs)
    return {
        **{name: value for name, value in measured.items() if math.isfinite(value)},
        "learning_rate": optimizer.param_groups[0]["lr"],
        "skipped_steps": float(skipped),
        "sampled_tokens": float(sum(len(one.token_S) for _, one in packs)),
        "tokens": float(tokens),
        "computed_tokens": float(sum(len(one.token_ids_N) for _, one in packs)),
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
    }


def _packs(trajectories: list[Trajectory], learning: Learning) -> list[tuple[Cut, Pack]]:
    """(distribution, pack): what was sampled from the same kind of distribution is computed together."""
    by_cut: dict[Cut, list[Sequence_]] = defaultdict(list)
    for trajectory, sequences in zip(trajectories, learning.sequences(trajectories), strict=True):
        by_cut[Cut.of(trajectory)] += sequences
    return [(cut, one) for cut, each in by_cut.items() for one in pack(each, learning.spec.pack_tokens)]


def _backward(spec: GRPOSpec, policy: Policy, packs: list[tuple[Cut, Pack]]) -> dict[str, float]:
    """Adds the gradient of the loss on these packs to the parameters, then scales the whole down to max_grad_norm.
    Returns the loss, the L2 norm before that, and what the packs say of the policy."""
    sums: dict[str, float] = defaultdict(float)
    count = sum(len(one.token_S) for _, one in packs)
    for index, (cut, given) in enumerate(packs):
        one = given.to(policy.device)
        logprob_S, entropy_S = policy.logprobs(one, cut, entropy_gradient=spec.entropy_coefficient > 0)
        old_S = one.logprob_S if spec.correction == "none" else one.old_S
        ratio_S = losses.ratio(losses.by_sequence(losses.log_ratio(logprob_S, old_S), one.sequence_S, spec.ratio))
        if spec.objective == "cispo":
            loss_S = losses.cispo_loss(ratio_S, logprob_S, one.advantage_S, spec.clip_low, spec.clip_high)
        else:
            loss_S = losses.clipped_policy_loss(ratio_S, one.advantage_S, spec.clip_low, spec.clip_high, spec.dual_clip)
        if spec.correction != "none":
            away_S = losses.by_sequence(
                losses.log_ratio(one.old_S, one.logprob_S), one.sequence_S, spec.correction_level
            )
            corrected_S = losses.correction(away_S, spec.correction_limit, spec.correction)
            loss_S = loss_S * corrected_S
            sums["correction"] += corrected_S.sum().item()
        in_loss = spec.kl_coefficient > 0 and spec.kl_in == "loss"
        if in_loss or index == 0:
            with policy.as_reference():
                reference_S, _ = policy.logprobs(one, cut)
            kl_S = losses.kl(logprob_S, reference_S, spec.kl_estimator)
            sums["kl"] += kl_S.sum().item()
            sums["kl_tokens"] += len(kl_S)
            if in_loss:
                loss_S = loss_S + spec.kl_coefficient * kl_S
        loss = (loss_S * one.weight_S).sum()
        if spec.entropy_coefficient:
            loss = loss - spec.entropy_coefficient * entropy_S.sum() / count
        loss.backward()
        sums["loss"] += loss.item()
        with torch.no_grad():
            known_S = torch.isfinite(one.logprob_S)
            token_S = losses.ratio(losses.log_ratio(logprob_S, one.logprob_S))
            sums["kl_sampler"] += (token_S - 1 - token_S.log())[known_S].sum().item()
            sums["known"] += known_S.sum().item()
            sums["entropy"] += entropy_S.sum().item()
            sums["clipped"] += losses.clipped(ratio_S, one.advantage_S, spec.clip_low, spec.clip_high).sum().item()
    sums["ewc"] = policy.add_penalty()
    grad_norm = torch.nn.utils.clip_grad_norm_(list(policy.parameters.values()), spec.max_grad_norm).item()
    return {
        "loss": sums["loss"],
        "kl": sums["kl"] / max(sums["kl_tokens"], 1),
        "kl_sampler": sums["kl_sampler"] / max(sums["known"], 1),
        "entropy": sums["entropy"] / max(count, 1),
        "clip_fraction": sums["clipped"] / max(count, 1),
        "grad_norm": grad_norm,
        **({"ewc": sums["ewc"]} if policy.penalty else {}),
        **({"correction": sums["correction"] / max(count, 1)} if spec.correction != "none" else {}),
    }


def _struck(
    spec: GRPOSpec,
    policy: Policy,
    measured: dict[str, float],
    trajectories: list[Trajectory],
    learning: Learning,
    step: int,
    guards: Guards,
) -> bool:
    """Whether a guard leaves the step out. Where one strikes, each trajectory is measured by itself; the gradient of
    the batch is put back after that."""
    loss, grad_norm, kl, entropy = (measured[name] for name in ("loss", "grad_norm", "kl_sampler", "entropy"))
    finite = all(math.isfinite(value) for value in (loss, grad_norm, kl))
    rules = [
        ("non_finite", not finite, spec.non_finite, "grad_norm", "Lower algorithm.learning_rate"),
        (
            "high_kl",
            kl > spec.max_kl,
            spec.high_kl,
            "kl_sampler",
            f"kl_sampler is the KL to the sampling policy in nats a token; algorithm.max_kl allows {spec.max_kl:g}. "
            "Lower algorithm.learning_rate or algorithm.epochs",
        ),
        (
            "low_entropy",
            entropy < spec.min_entropy,
            spec.low_entropy,
            "certainty",
            f"algorithm.min_entropy asks for {spec.min_entropy:g} nats a token. Raise collect.temperature or "
            "algorithm.kl_coefficient, or lower algorithm.learning_rate",
        ),
    ]
    struck = [rule for rule in rules if rule[1]]
    if not struck:
        return False
    shown = {"loss": loss, "grad_norm": grad_norm, "kl_sampler": kl, "entropy": entropy}
    kept = {name: parameter.grad for name, parameter in policy.parameters.items()}
    each: dict[str, dict[str, float]] = {}

    def measure(trajectory: Trajectory) -> dict[str, float]:
        if trajectory.id not in each:
            for parameter in policy.parameters.values():
                parameter.grad = None
            found = _backward(spec, policy, _packs([trajectory], learning))
            each[trajectory.id] = {name: found[name] for name in shown} | {"certainty": -found["entropy"]}
        return each[trajectory.id]

    skips = []
    try:
        for guard, _, action, by, advice in struck:
            skips.append(guards.strike(guard, action, step, shown, trajectories, measure, by=by, advice=advice))
    finally:
        for name, parameter in policy.parameters.items():
            parameter.grad = kept[name]
    return any(skips)


def _set_learning_rate(optimizer: torch.optim.Optimizer, spec: GRPOSpec, step: int) -> None:
    share = min(1.0, step / spec.warmup_steps) if spec.warmup_steps else 1.0
    for group in optimizer.param_groups:
        group["lr"] = spec.learning_rate * share
