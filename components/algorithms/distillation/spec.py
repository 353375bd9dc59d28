"""Spec of on-policy distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from components.algorithms.spec import DecaySpec
from components.models.spec import FrozenModelSpec

if TYPE_CHECKING:
    from components.algorithms.trainer import Trainer, TrainingContext


class DistillSpec(DecaySpec):
    """On-policy distillation: minimises the KL divergence from a teacher at each token that the policy sampled
    (arXiv:2306.13649)."""

    name: Literal["distill"] = "distill"
    epochs: int = Field(1, ge=1)
    """Passes over the trajectories of a round."""
    batch_size: int = Field(16, ge=1)
    """Trajectories per gradient step. A trajectory with several histories counts once per history."""
    teacher: FrozenModelSpec
    """Teacher model. It must have the vocabulary of the model in training."""
    temperature: float = Field(1.0, gt=0)
    """Temperature: the logits of both models are divided by it before the comparison."""

    ignores_rewards: ClassVar[bool] = True

    def build(self, context: TrainingContext) -> Trainer:
        from components.algorithms.distillation.trainer import load_teacher, train_distill
        from components.algorithms.trainer import FunctionTrainer

        assert context.teacher_dir is not None, "algorithm=distill requires teacher_dir"
        teacher = load_teacher(context.policy, context.base_dir, self.teacher, context.teacher_dir, context.warm)
        return FunctionTrainer(lambda: train_distill(self, context, teacher))

    @property
    def teacher_model(self) -> FrozenModelSpec:
        return self.teacher

    def key_part(self) -> dict[str, Any]:
        return super().key_part() | {"teacher": self.teacher.key_part()}
