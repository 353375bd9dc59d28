"""On-policy distillation (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543): the student samples, and the teacher's
distribution at each sampled token is the target.

The loss of a gradient step is the mean over its sampled tokens of KL(student || teacher), over the whole vocabulary at
the position of the token (`divergence`), both at `temperature`. As in GKD, no gradient flows through the sampling of
the tokens; rewards are not used. The reverse KL divergence penalises tokens that the teacher finds unlikely. It
requires the student's own samples, because it is an expectation under the student.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from components.algorithms.distillation.divergence import teacher_kl
from components.algorithms.loop import distributed, schedule
from components.algorithms.loop.guards import TrainingGuards
from components.algorithms.loop.metrics import mean_metrics, token_counts
from components.algorithms.policy import sharded
from components.algorithms.policy.packing import Sequence_, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.gradient_steps import examples_by_step, finish
from components.algorithms.sft.trainer import examples
from components.algorithms.spec import DistillSpec
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Trajectory

Row = dict[str, Any]


def train_distill(
    spec: DistillSpec,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    base_dir: Path,
    trajectories: Sequence[Trajectory],
    *,
    teacher: Policy,
    step: int,
    seed: int,
    scratch: Path,
    on_step: Callable[[dict[str, float]], None],
    earlier_steps: Sequence[dict[str, float]] = (),
    rounds: schedule.Rounds = schedule.ONLY_ROUND,
) -> tuple[int, dict[str, float]]:
    """Take `spec.epochs` passes over the trajectories, scored or not. Return the new step count and the mean metrics.

    earlier_steps: metrics of the steps that an interrupted run took after step `step`; policy and optimizer are in the
    state after those steps.

    Raises TrainingDiverged if a guard stops the training (`guards`).
    """
    guards = TrainingGuards(scratch)
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    rows = examples(ChatFormat(load_tokenizer(base_dir)), trajectories, policy.spec.max_length)
    logs = list(earlier_steps)
    batches = list(examples_by_step(rows, spec.epochs, spec.batch_size, seed, step))
    for index, batch in enumerate(batches):
        if index < len(earlier_steps):
            continue
        number = step + index + 1
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * schedule.share(spec, number, rounds, index / len(batches))
        metrics = {
            "step": float(number),
            **_gradient_step(spec, policy, teacher, optimizer, batch, by_id, number, guards),
        }
        logs.append(metrics)
        on_step(metrics)
    return step + len(logs), {**mean_metrics(logs), "examples": float(len(rows))}


def _gradient_step(
    spec: DistillSpec,
    policy: Policy,
    teacher: Policy,
    optimizer: torch.optim.Optimizer,
    batch: list[Row],
    by_id: dict[str, Trajectory],
    step: int,
    guards: TrainingGuards,
) -> dict[str, float]:
    started = time.monotonic()
    measured, counts = _backward(spec, policy, teacher, batch)
    skipped = False
    if not all(map(math.isfinite, measured.values())) and not policy.loss_scale.overflowed(measured):

        def measure(trajectory: Trajectory) -> dict[str, float]:
            optimizer.zero_grad(set_to_none=True)
            trajectory_rows = [row for row in batch if row["trajectory_id"] == trajectory.id]
            return _backward(spec, policy, teacher, trajectory_rows)[0]

        trajectory_ids = dict.fromkeys(row["trajectory_id"] for row in batch)
        skipped = guards.strike(
            *(
                "non_finite",
                spec.non_finite,
                step,
                measured,
                [by_id[trajectory_id] for trajectory_id in trajectory_ids],
                measure,
            ),
            by="grad_norm",
            advice=policy.loss_scale.advice("Lower algorithm.learning_rate"),
        )
    return finish(optimizer, measured, counts, policy.loss_scale, skipped=skipped, started=started)


def _backward(
    spec: DistillSpec, policy: Policy, teacher: Policy, batch: Sequence[Row]
) -> tuple[dict[str, float], dict[str, float]]:
    """Add the gradient of the mean KL divergence to the parameters and scale it down to max_grad_norm. Return the
    measured metrics and token counts."""
    sequences = [Sequence_(row["input_ids"], row["targets"]) for row in batch]
    packs = pack(sequences, spec.pack_tokens, padded=policy.padded or teacher.padded)
    counts = token_counts(packs)
    sampled = counts["sampled_tokens"]
    total = 0.0
    for packed, real in distributed.share_with_dropout(packs):
        loss = teacher_kl(policy, teacher, packed, spec.temperature).sum() / sampled
        policy.loss_scale.backward(loss if real else loss * 0)
        total += loss.item() if real else 0.0
    distributed.sum_gradients(policy.parameters.values())
    policy.loss_scale.unscale(policy.parameters.values())
    total = distributed.sums({"loss": total})["loss"]
    penalty = {"ewc": policy.add_penalty()} if policy.penalty else {}
    grad_norm = sharded.clip(policy.parameters.values(), spec.max_grad_norm)
    return {"loss": total, "grad_norm": grad_norm, **penalty}, counts
