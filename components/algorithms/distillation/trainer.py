"""On-policy distillation (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543): the student samples, and the teacher's
distribution at each sampled token is the target.

The loss of a gradient step is the mean over its sampled tokens of KL(student || teacher), over the whole vocabulary at
the position of the token, both at `temperature`. As in GKD, no gradient flows through the sampling of
the tokens; rewards are not used. The reverse KL divergence penalises tokens that the teacher finds unlikely. It
requires the student's own samples, because it is an expectation under the student.

Both policies compute the same pack. Logits are computed for `LOGIT_ROWS` nodes at a time and recomputed in the backward
pass, so memory does not grow with tokens times vocabulary.

The teacher is a base model or an adapter on one, as a policy of which only the reference is used. If it is the
student's own base, with an adapter of the same shape or none, the student's model serves as the teacher too, so that no
second copy of the base is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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
from components.algorithms.loop.token_rows import TokenRow
from components.algorithms.policy import policy as policies
from components.algorithms.policy.logits import LogitHead
from components.algorithms.policy.packing import Pack, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.sft.trainer import token_rows
from components.algorithms.trainer import TrainingContext, TrainingResult
from components.errors import ResourceError
from components.json_text import read_json
from components.models.spec import FrozenModelSpec, LoraSpec
from components.models.targets import names_of
from components.models.weights import pick_device, vocabulary

if TYPE_CHECKING:
    from components.algorithms.distillation.spec import DistillSpec


def train_distill(spec: DistillSpec, context: TrainingContext, teacher: Policy) -> TrainingResult:
    """Take `spec.epochs` passes over the trajectories, scored or not. Return the new step count and the mean metrics.

    Raises TrainingDiverged if a guard stops the training (`guards`).
    """
    policy = context.policy
    rows = token_rows(context)

    def backward(batch: Sequence[TokenRow]) -> StepMeasures:
        packs = pack([row.sequence() for row in batch], spec.pack_size, padded=policy.padded or teacher.padded)
        return add_mean_gradient(
            policy, packs, lambda packed: teacher_kl(policy, teacher, packed, spec.temperature), spec.max_grad_norm
        )

    logs = take_gradient_steps(
        context,
        examples_by_step(rows, spec.epochs, spec.batch_size, context.seed, context.step),
        GuardedStep(spec, context, backward, lambda row: context.trajectories[row.place]),
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


def load_teacher(
    policy: Policy, base_dir: Path, spec: FrozenModelSpec, teacher_dir: Path, warm: dict[str, Any] | None = None
) -> Policy:
    """Return the teacher's policy. base_dir, teacher_dir: local folders of the student's and the teacher's base model.
    warm may cache a loaded teacher for the next call. Raises ResourceError if the vocabularies differ, ArtifactError
    for an adapter that does not fit."""
    require_same_vocabulary(base_dir, teacher_dir)
    adapter = spec.adapter_dir()
    if _shares(policy, base_dir, spec, teacher_dir, adapter):
        policy.use_reference(adapter)
        return policy
    model = spec.model(policy.spec.max_length, _lora(adapter))
    recipe = f"{teacher_dir} {model.content()} {model.model_dump_json()}"
    warm = {} if warm is None else warm
    cached_recipe, teacher = warm.pop("teacher", (None, None))
    if cached_recipe != recipe:
        teacher = None  # free the old teacher before the new one is loaded
        teacher = Policy(teacher_dir, model, seed=0)
    warm["teacher"] = recipe, teacher
    teacher.use_reference(adapter)
    return teacher


def require_same_vocabulary(base_dir: Path, teacher_dir: Path) -> None:
    """Raise ResourceError unless both tokenizers map the same tokens to the same ids: otherwise the compared
    distributions are over different tokens."""
    if base_dir == teacher_dir:
        return
    student_ids, teacher_ids = vocabulary(base_dir), vocabulary(teacher_dir)
    if student_ids != teacher_ids:
        differing = sorted(
            token
            for token in student_ids.keys() | teacher_ids.keys()
            if student_ids.get(token) != teacher_ids.get(token)
        )
        raise ResourceError(
            f"algorithm.teacher: the vocabularies differ: {len(differing)} tokens do not have the same id in both, "
            f"such as {differing[0]!r} ({student_ids.get(differing[0])} in model, {teacher_ids.get(differing[0])} in "
            "the teacher). On-policy distillation compares distributions over one vocabulary: choose a teacher of the "
            "same family, or train on the teacher's episodes with warmup.teacher"
        )


def _shares(policy: Policy, base_dir: Path, spec: FrozenModelSpec, teacher_dir: Path, adapter: Path | None) -> bool:
    """Return True if the student's model can also serve as the teacher."""
    if policy.adapter is None or policy.spec.lora is None:
        return False
    if teacher_dir != base_dir or spec.dtype != policy.spec.dtype or pick_device(spec.device) != policy.device:
        return False
    if adapter is None:
        return True
    from safetensors import safe_open

    lora, own_shapes = _lora(adapter), {name: list(tensor.shape) for name, tensor in policy.adapter.tensors().items()}
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  safe_open is not a mapping
    return (lora.rank, lora.alpha) == (policy.spec.lora.rank, policy.spec.lora.alpha) and shapes == own_shapes


def _lora(adapter: Path | None) -> LoraSpec:
    """Return the LoRA spec of a saved adapter; rank 1 if there is none."""
    if adapter is None:
        return LoraSpec(rank=1)
    saved = read_json(adapter / "adapter_config.json")
    return LoraSpec(rank=saved["r"], alpha=saved["lora_alpha"], target_modules=names_of(saved))
