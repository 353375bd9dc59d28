"""Group relative policy optimisation on stored trajectories (arXiv:2402.03300).

For each sampled token, with ratio r to the policy that sampled it and the advantage A of its trajectory within its
group:

    loss = -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coefficient * KL(policy || reference)

Sampled tokens and their log-probabilities come from the trajectories as they were drawn; nothing is tokenised again.
Trajectories that share a prefix share its computation (`packing`). Groups without spread contribute nothing; a batch
of only such groups leaves the adapter and the optimizer as they are, byte for byte.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from components.algorithms import losses
from components.algorithms.advantages import group_advantages
from components.algorithms.packing import Pack, Sequence_, pack
from components.algorithms.policy import Policy
from components.algorithms.spec import GRPOSpec
from components.errors import TrainingDiverged
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
) -> tuple[int, dict[str, float]]:
    """Takes `spec.epochs * spec.minibatches` gradient steps. Returns the new step count and the mean metrics.

    Raises TrainingDiverged, with the batch's trajectory ids written to `scratch/diverged.json`.
    """
    groups = with_advantages(trajectories, scale=spec.scale_advantages)
    logs: list[dict[str, float]] = []
    for epoch in range(spec.epochs):
        order = list(groups)
        random.Random(f"{seed}-{step}-{epoch}").shuffle(order)
        for part in _parts(order, spec.minibatches):
            step += 1
            _set_learning_rate(optimizer, spec, step)
            metrics = _gradient_step(spec, policy, optimizer, part, step, scratch)
            logs.append(metrics)
            on_step({"step": step, **metrics})
    return step, _mean(logs)


def with_advantages(trajectories: Sequence[Trajectory], *, scale: bool) -> list[Group]:
    """Groups that carry signal, their advantages set. Unscored and failed trajectories take no part."""
    scored = [one for one in trajectories if one.reward is not None and one.failure is None]
    kept = []
    for group in by_scenario(scored).values():
        advantages = group_advantages([trajectory.reward or 0.0 for trajectory in group], scale=scale)
        for trajectory, advantage in zip(group, advantages, strict=True):
            trajectory.advantage = advantage
        if any(advantages):
            kept.append(group)
    return kept


def _parts(groups: list[Group], count: int) -> list[list[Group]]:
    """Groups dealt out to minibatches of nearly equal size; empty ones are left out."""
    return [part for part in (groups[index::count] for index in range(count)) if part]


def _gradient_step(
    spec: GRPOSpec, policy: Policy, optimizer: torch.optim.Optimizer, groups: list[Group], step: int, scratch: Path
) -> dict[str, float]:
    started = time.monotonic()
    trajectories = [trajectory for group in groups for trajectory in group]
    temperature = float(trajectories[0].sampling.get("temperature", 1.0))
    packs = pack(_sequences(trajectories, spec.normalization), spec.pack_tokens)
    sums: dict[str, float] = defaultdict(float)
    count = sum(len(one.token_S) for one in packs)
    measured = 0
    for index, one in enumerate(packs):
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
            measured += len(kl_S)
            if spec.kl_coefficient:
                loss_S = loss_S + spec.kl_coefficient * kl_S
        loss = (loss_S * weight_S).sum()
        loss.backward()
        sums["loss"] += loss.item()
        with torch.no_grad():
            finite_S = torch.isfinite(old_S)
            sums["kl_sampler"] += (ratio_S - 1 - ratio_S.log())[finite_S].sum().item()
            sums["entropy"] += entropy_S.sum().item()
            sums["clipped"] += losses.clipped(ratio_S, advantage_S, spec.clip_low, spec.clip_high).sum().item()
    grad_norm = torch.nn.utils.clip_grad_norm_(list(policy.parameters.values()), spec.max_grad_norm).item()
    kl_sampler = sums["kl_sampler"] / count
    if not (math.isfinite(sums["loss"]) and math.isfinite(grad_norm) and kl_sampler <= spec.max_kl):
        optimizer.zero_grad(set_to_none=True)
        _diverged(spec, trajectories, step, sums["loss"], grad_norm, kl_sampler, scratch)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seconds = time.monotonic() - started
    computed = sum(len(one.token_ids_N) for one in packs)
    return {
        "loss": sums["loss"],
        "kl": sums["kl"] / max(measured, 1),
        "kl_sampler": kl_sampler,
        "entropy": sums["entropy"] / count,
        "clip_fraction": sums["clipped"] / count,
        "grad_norm": grad_norm,
        "learning_rate": optimizer.param_groups[0]["lr"],
        "sampled_tokens": float(count),
        "tokens": float(sum(sum(one.lengths) for one in packs)),
        "computed_tokens": float(computed),
        "tokens_per_s": sum(sum(one.lengths) for one in packs) / seconds,
        "seconds": seconds,
    }


def _sequences(trajectories: list[Trajectory], normalization: str) -> list[Sequence_]:
    """Histories as sequences; weights add up to 1 over the batch."""
    sampled = {
        trajectory.id: sum(sum(history.sampled_mask()) for history in trajectory.histories)
        for trajectory in trajectories
    }
    total = sum(sampled.values())
    sequences = []
    for trajectory in trajectories:
        own = sampled[trajectory.id]
        weight = 1 / total if normalization == "tokens" else 1 / (max(own, 1) * len(trajectories))
        for history in trajectory.histories:
            targets = [index for index, is_sampled in enumerate(history.sampled_mask()) if is_sampled]
            sequences.append(
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


def _diverged(
    spec: GRPOSpec, trajectories: list[Trajectory], step: int, loss: float, grad_norm: float, kl: float, scratch: Path
) -> None:
    record = {"step": step, "loss": loss, "grad_norm": grad_norm, "kl_sampler": kl}
    record["trajectories"] = [trajectory.id for trajectory in trajectories]
    (scratch / "diverged.json").write_text(json.dumps(record, indent=1))
    raise TrainingDiverged(
        f"gradient step {step}: loss {loss:.4g}, gradient norm {grad_norm:.4g}, KL to the sampling policy {kl:.4g} nats a "
        f"token (algorithm.max_kl is {spec.max_kl:g}). No checkpoint was written; the batch is in "
        f"{scratch / 'diverged.json'}. Lower algorithm.learning_rate or algorithm.epochs"
    )


def _mean(logs: list[dict[str, float]]) -> dict[str, float]:
    """Mean over gradient steps; counts and seconds are added up."""
    if not logs:
        return {"skipped": 1.0}
    added = {"sampled_tokens", "tokens", "computed_tokens", "seconds"}
    means = {name: sum(log[name] for log in logs) / (1 if name in added else len(logs)) for name in logs[0]}
    means["tokens_per_s"] = means["tokens"] / means["seconds"]
    return means


__all__ = ["Pack", "train_grpo", "with_advantages"]
