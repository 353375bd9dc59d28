"""Judge model on this machine, with weights of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from components.models.spec import LoraSpec, ModelSpec, TeacherSpec
from components.rewards.llm.judge_model import JudgeModelSpec

if TYPE_CHECKING:
    from components.rewards.llm.protocol import ModelClient
    from components.rewards.protocol import Means


class EmbeddedJudge(JudgeModelSpec):
    """Model on this machine, in the process of the stage."""

    name: Literal["embedded"] = "embedded"
    model: TeacherSpec
    """Weights of the model."""
    context: int = Field(4096, ge=256)
    """Context length: maximum tokens of prompt and answer together."""

    @property
    def label(self) -> str:
        return self.model.name

    @property
    def local_model(self) -> ModelSpec:
        return self.model.model(self.context)

    def build(self, means: Means) -> ModelClient:
        from components.rewards.llm.local_model import LocalModelClient

        return LocalModelClient(self, means, self.model.model(self.context, LoraSpec()))

    def key_part(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json", exclude={"model"}), "model": self.model.key_part()}
