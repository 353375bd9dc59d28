"""On-policy distillation (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543): the student samples, and the teacher's
distribution at each sampled token is the target.

The loss of a gradient step is the mean over its sampled tokens of KL(student || teacher), over the whole vocabulary at
the position of the token (`divergence`), both at `temperature`. As in GKD, no gradient flows through the sampling of
the tokens; rewards are not used. The reverse KL divergence penalises tokens that the teacher finds unlikely. It
requires the student's own samples, because it is an expectation under the student.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from components.algorithms.distillation.divergence import teacher_kl
from components.algorithms.loop import schedule
from components.algorithms.loop.epochs import GuardedStep, add_mean_gradient, take_gradient_steps
from components.algorithms.loop.metrics import mean_metrics
from components.algorithms.policy.packing import Sequence_, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.gradient_steps import examples_by_step
from components.algorithms.sft.trainer import Row, examples
from components.algorithms.spec import DistillSpec
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Trajectory


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
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    rows = examples(ChatFormat(load_tokenizer(base_dir)), trajectories, policy.spec.max_length)

    def backward(batch: Sequence[Row]) -> tuple[dict[str, float], dict[str, float]]:
        sequences = [Sequence_(row["input_ids"], row["targets"]) for row in batch]
        packs = pack(sequences, spec.pack_tokens, padded=policy.padded or teacher.padded)
        return add_mean_gradient(
            policy, packs, lambda packed: teacher_kl(policy, teacher, packed, spec.temperature), spec.max_grad_norm
        )

    logs = take_gradient_steps(
        list(examples_by_step(rows, spec.epochs, spec.batch_size, seed, step)),
        GuardedStep(spec, policy, optimizer, scratch, backward, lambda row: by_id[row["trajectory_id"]]),
        lambda number, done: spec.learning_rate * schedule.share(spec, number, rounds, done),
        optimizer,
        step=step,
        on_step=on_step,
        earlier_steps=earlier_steps,
    )
    return step + len(logs), {**mean_metrics(logs), "examples": float(len(rows))}
