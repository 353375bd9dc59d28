"""Group relative policy optimisation on stored trajectories (arXiv:2402.03300).

For each sampled token, with ratio r to the policy that sampled it and the advantage A of its trajectory within its
group:

    loss = -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coefficient * KL(policy || reference)

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

from components.algorithms import losses
from components.algorithms.advantages import group_advantages
from components.algorithms.guards import Guards
from components.algorithms.metrics import over_steps
from components.algorithms.packing import Pack, Sequence_, pack
from components.algorithms.policy import Policy
from components.algorithms.spec import GRPOSpec
from components.errors import ArtifactError
from components.trajectories.groups import by_scenario
from components.trajectories.schema import Trajectory

Group = list[Trajectory]


def train_grpo(
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
    groups = with_advantages(trajectories, scale=spec.scale_advantages)
    logs = list(taken)
    for number, part in enumerate(_batches(groups, spec, seed, step), start=step + 1):
        if number <= step + len(taken):
            continue
        _set_learning_rate(optimizer, spec, number)
        metrics = {"step": float(number), **_gradient_step(spec, policy, optimizer, part, number, guards)}
        logs.append(metrics)
        on_step(metrics)
    return step + len(logs), over_steps(logs)


def with_advantages(trajectories: Sequence[Trajectory], *, scale: bool) -> list[Group]:
    """Groups that carry signal, their advantages set: rewards that differ, and sampled tokens to learn from. Unscored
    and failed trajectories take no part."""
    scored = [one for one in trajectories if one.reward is not None and one.failure is None]
    kept = []
    for group in by_scenario(scored).values():
        advantages = group_advantages([trajectory.reward or 0.0 for trajectory in group], scale=scale)
        for trajectory, advantage in zip(group, advantages, strict=True):
            trajectory.advantage = advantage
        if any(advantages) and any(_sampled_tokens(trajectory) for trajectory in group):
            kept.append(group)
    return kept


def _sampled_tokens(trajectory: Trajectory) -> int:
    return sum(sum(history.sampled_mask()) for history in trajectory.histories)


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


def _gradient_step(
    spec: GRPOSpec, policy: Policy, optimizer: torch.optim.Optimizer, groups: list[Group], step: int, guards: Guards
) -> dict[str, float]:
    started = time.monotonic()
    trajectories = [trajectory for group in groups for trajectory in group]
    packs = _packs(trajectories, spec)
    measured = _backward(spec, policy, packs)
    if skipped := _struck(spec, policy, measured, trajectories, step, guards):
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


def _backward(spec: GRPOSpec, policy: Policy, packs: list[tuple[float, Pack]]) -> dict[str, float]:
    """Adds the gradient of the loss on these packs to the parameters, then scales the whole down to max_grad_norm.
    Returns the loss, the L2 norm before that, and what the packs say of the policy."""
    sums: dict[str, float] = defaultdict(float)
    count = sum(len(one.token_S) for _, one in packs)
    for index, (temperature, one) in enumerate(packs):
        logprob_S, entropy_S = policy.logprobs(one, temperature)
        advantage_S, weight_S, old_S = (
            tensor.to(policy.device) for tensor in (one.advantage_S, one.weight_S, one.logprob_S)
        )
        ratio_S = losses.policy_ratio(logprob_S, old_S)
        loss_S = losses.clipped_policy_loss(ratio_S, advantage_S, spec.clip_low, spec.clip_high)
        if spec.kl_coefficient or index == 0:
            with policy.as_reference():
                reference_S, _ = policy.logprobs(one, temperature)
            kl_S = losses.kl_k3(logprob_S, reference_S)
            sums["kl"] += kl_S.sum().item()
            sums["kl_tokens"] += len(kl_S)
            if spec.kl_coefficient:
                loss_S = loss_S + spec.kl_coefficient * kl_S
        loss = (loss_S * weight_S).sum()
        loss.backward()
        sums["loss"] += loss.item()
        with torch.no_grad():
            known_S = torch.isfinite(old_S)
            sums["kl_sampler"] += (ratio_S - 1 - ratio_S.log())[known_S].sum().item()
            sums["known"] += known_S.sum().item()
            sums["entropy"] += entropy_S.sum().item()
            sums["clipped"] += losses.clipped(ratio_S, advantage_S, spec.clip_low, spec.clip_high).sum().item()
    grad_norm = torch.nn.utils.clip_grad_norm_(list(policy.parameters.values()), spec.max_grad_norm).item()
    return {
        "loss": sums["loss"],
        "kl": sums["kl"] / max(sums["kl_tokens"], 1),
        "kl_sampler": sums["kl_sampler"] / max(sums["known"], 1),
        "entropy": sums["entropy"] / max(count, 1),
        "clip_fraction": sums["clipped"] / max(count, 1),
        "grad_norm": grad_norm,
    }


def _struck(
    spec: GRPOSpec,
    policy: Policy,
    measured: dict[str, float],
    trajectories: list[Trajectory],
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
            found = _backward(spec, policy, _packs([trajectory], spec))
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


def _packs(trajectories: list[Trajectory], spec: GRPOSpec) -> list[tuple[float, Pack]]:
    """(sampling temperature, pack): what was sampled at one temperature is computed together."""
    by_temperature: dict[float, list[Sequence_]] = defaultdict(list)
    for trajectory, sequences in zip(trajectories, _sequences(trajectories, spec.normalization), strict=True):
        by_temperature[_temperature(trajectory)] += sequences
    return [(value, one) for value, each in by_temperature.items() for one in pack(each, spec.pack_tokens)]


def _temperature(trajectory: Trajectory) -> float:
    """At which it was sampled. Raises ArtifactError where it was not drawn from the whole distribution."""
    temperature = float(trajectory.sampling.get("temperature", 1.0))
    if temperature <= 0 or trajectory.sampling.get("top_p", 1.0) < 1 or trajectory.sampling.get("top_k", 0) > 0:
        raise ArtifactError(
            f"trajectory {trajectory.id} was sampled with {trajectory.sampling}: the ratio of GRPO needs the "
            "log-probabilities of the whole distribution. Collect with temperature above 0, top_p 1 and top_k 0"
        )
    return temperature


def _sequences(trajectories: list[Trajectory], normalization: str) -> list[list[Sequence_]]:
    """The histories of each trajectory as sequences; the weights of all sampled tokens add up to 1."""
    sampled = [_sampled_tokens(trajectory) for trajectory in trajectories]
    total, taking_part = sum(sampled), sum(own > 0 for own in sampled)
    sequences: list[list[Sequence_]] = []
    for trajectory, own in zip(trajectories, sampled, strict=True):
        sequences.append([])
        if not own:
            continue
        weight = 1 / total if normalization == "tokens" else 1 / (own * taking_part)
        for history in trajectory.histories:
            targets = [index for index, is_sampled in enumerate(history.sampled_mask()) if is_sampled]
            sequences[-1].append(
                Sequence_(
                    history.token_ids,
                    targets,
                    [history.logprobs[index] for index in targets],
                    trajectory.advantage or 0.0,
                    weight,
                )
            )
    return sequences


def _set_learning_rate(optimizer: torch.optim.Optimizer, spec: GRPOSpec, step: int) -> None:
    share = min(1.0, step / spec.warmup_steps) if spec.warmup_steps else 1.0
    for group in optimizer.param_groups:
        group["lr"] = spec.learning_rate * share


__all__ = ["train_grpo", "with_advantages"]
