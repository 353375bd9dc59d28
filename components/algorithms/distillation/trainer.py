"""On-policy distillation (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543): the student samples, and the teacher's
distribution at each sampled token is the target.

The loss of a gradient step is the mean over its sampled tokens of KL(student || teacher), over the whole vocabulary at
the position of the token (`divergence`), both at `temperature`. As in GKD, no gradient flows through the sampling of
the tokens; rewards are not used. The reverse KL divergence penalises tokens that the teacher finds unlikely. It
requires the student's own samples, because it is an expectation under the student.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from components.algorithms.distillation.divergence import teacher_kl
from components.algorithms.loop import schedule
from components.algorithms.loop.epochs import (
    GuardedStep,
    StepMeasures,
    add_mean_gradient,
    examples_by_step,
    take_gradient_steps,
)
from components.algorithms.loop.metrics import mean_metrics
from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.sft.trainer import Row, examples
from components.algorithms.trainer import TrainingContext, TrainingResult
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat

if TYPE_CHECKING:
    from components.algorithms.distillation.spec import DistillSpec


def train_distill(spec: DistillSpec, context: TrainingContext, teacher: Policy) -> TrainingResult:
    """Take `spec.epochs` passes over the trajectories, scored or not. Return the new step count and the mean metrics.

    Raises TrainingDiverged if a guard stops the training (`guards`).
    """
    policy = context.policy
    by_id = {trajectory.id: trajectory for trajectory in context.trajectories}
    rows = examples(ChatFormat(load_tokenizer(context.base_dir)), context.trajectories, policy.spec.max_length)

    def backward(batch: Sequence[Row]) -> StepMeasures:
        sequences = [TokenSequence(row["input_ids"], row["targets"]) for row in batch]
        packs = pack(sequences, spec.pack_tokens, padded=policy.padded or teacher.padded)
        return add_mean_gradient(
            policy, packs, lambda packed: teacher_kl(policy, teacher, packed, spec.temperature), spec.max_grad_norm
        )

    logs = take_gradient_steps(
        context,
        list(examples_by_step(rows, spec.epochs, spec.batch_size, context.seed, context.step)),
        GuardedStep(spec, context, backward, lambda row: by_id[row["trajectory_id"]]),
        [spec.learning_rate],
        lambda number, done: schedule.share(spec, number, context.rounds, done),
    )
    return context.step + len(logs), {**mean_metrics(logs), "examples": float(len(rows))}
