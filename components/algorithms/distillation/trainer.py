"""On-policy distillation (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543): the student samples, and the teacher's
distribution at each sampled token is the target.

The loss of a gradient step is the mean over its sampled tokens of KL(student || teacher), over the whole vocabulary at
the position of the token, both at `temperature`. As in GKD, no gradient flows through the sampling of
the tokens; rewards are not used. The reverse KL divergence penalises tokens that the teacher finds unlikely. It
requires the student's own samples, because it is an expectation under the student.

Both policies compute the same pack. Logits are computed for `LOGIT_ROWS` nodes at a time and recomputed in the backward
pass, so memory does not grow with tokens times vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from components.algorithms.loop import schedule
from components.algorithms.loop.epochs import (
    GuardedStep,
    StepMeasures,
    add_mean_gradient,
    examples_by_step,
    take_gradient_steps,
)
from components.algorithms.loop.metrics import mean_metrics
from components.algorithms.policy import policy as policies
from components.algorithms.policy.logits import LogitHead
from components.algorithms.policy.packing import Pack, TokenSequence, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.sft.trainer import Row, examples
from components.algorithms.trainer import TrainingContext, TrainingResult
from components.errors import ResourceError
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


def reverse_kl(logits_UV: torch.Tensor, teacher_UV: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the (U,) KL(policy || teacher) = Σ_v p(v) (log p(v) - log q(v)) in nats (MiniLLM, arXiv:2306.08543, eq. 1,
    for one token). Logits beyond the smaller of the two vocabularies belong to no token, because models round up the
    size of their head; they are ignored."""
    width = min(logits_UV.shape[-1], teacher_UV.shape[-1])
    student_logp_UV, teacher_logp_UV = (
        torch.log_softmax(logits[:, :width].float() / temperature, dim=-1) for logits in (logits_UV, teacher_UV)
    )
    return (student_logp_UV.exp() * (student_logp_UV - teacher_logp_UV)).sum(-1)


def teacher_kl(policy: Policy, teacher: Policy, pack: Pack, temperature: float) -> torch.Tensor:
    """Return the (S,) reverse KL divergence at the sampled tokens of the pack, with gradient to the policy. teacher:
    its reference is the target; it may be the policy itself."""
    pack = pack.to(policy.device)
    with teacher.as_reference():
        teacher_UX, teacher_head = teacher.rows(pack)
        teacher_UX = teacher_UX.to(policy.device)
    if isinstance(teacher_head, LogitHead) and teacher_head.adapted:
        raise ResourceError(
            "model.lora.target_modules puts an adapter on the output head, which algorithm=distill does not support; "
            "expected all-linear, or names of other layers"
        )
    student_UX, head = policy.rows(pack)

    def read(student_UX: torch.Tensor, teacher_UX: torch.Tensor) -> Any:
        with torch.no_grad():
            teacher_UV = teacher_head(teacher_UX.to(teacher.device)).to(policy.device)
        return reverse_kl(head(student_UX), teacher_UV, temperature)

    rows, parts = policies.LOGIT_ROWS, []
    for first in range(0, len(student_UX), rows):
        arguments = student_UX[first : first + rows], teacher_UX[first : first + rows]
        recompute = torch.is_grad_enabled() and len(student_UX) > rows
        parts.append(checkpoint(read, *arguments, use_reentrant=False) if recompute else read(*arguments))
    return torch.cat(parts)[pack.row_S]
