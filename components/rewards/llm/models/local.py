"""Judge models on this machine: a model with weights of its own, and the policy whose episodes are judged."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from components.errors import ContextOverflow, EngineError, JudgeError, ResourceError
from components.inference.protocol import ChatRequest, Sampling
from components.models.spec import FrozenModelSpec, LoraSpec, ModelSpec
from components.rewards.llm.judge_model import JudgeModelSpec
from components.rewards.llm.protocol import JudgeAnswer, Messages
from components.rewards.protocol import RewardResources


class EmbeddedJudge(JudgeModelSpec):
    """Model on this machine, in the process of the stage."""

    name: Literal["embedded"] = "embedded"
    model: FrozenModelSpec
    """Weights of the model."""
    context: int = Field(4096, ge=256)
    """Context length: maximum tokens of prompt and answer together."""

    @property
    def label(self) -> str:
        return self.model.name

    @property
    def local_model(self) -> ModelSpec:
        return self.model.model(self.context)

    def build(self, resources: RewardResources) -> LocalModelClient:
        return LocalModelClient(self, resources, self.model.model(self.context, LoraSpec()))

    def key_part(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json", exclude={"model"}), "model": self.model.key_part()}


class PolicyJudge(JudgeModelSpec):
    """The policy whose episodes are judged, with the weights that generated them."""

    name: Literal["policy"] = "policy"

    asks_policy: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "policy"

    def build(self, resources: RewardResources) -> LocalModelClient:
        return LocalModelClient(self, resources)

    def key_part(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class LocalModelClient:
    """Client of an engine on this machine, without cost. model: the model that judges; None is the policy whose
    episodes are judged. Raises ResourceError if there is no engine."""

    priced = True

    def __init__(self, spec: JudgeModelSpec, resources: RewardResources, model: ModelSpec | None = None):
        if resources.engine is None:
            raise ResourceError("a judge on this machine needs an engine; expected RewardResources(engine=...)")
        self._spec = spec
        self.label = "the policy itself" if model is None else spec.label
        self._engine = resources.engine(model)
        self.version = self._engine.policy if model is None else ""

    def price(self, read: int, written: int) -> float:
        return 0.0

    async def call(
        self, messages: Messages, schema: dict[str, Any] | None, question_digest: str, immediate: bool
    ) -> JudgeAnswer:
        sampling = Sampling(temperature=self._spec.temperature, max_tokens=self._spec.max_tokens)
        request = ChatRequest([dict(message) for message in messages], policy=self._engine.policy, sampling=sampling)
        try:
            response = await self._engine.chat(request)
        except ContextOverflow as error:
            hint = f"show the judge less: reward.model.longest={self._spec.longest}"
            raise JudgeError(f"{self.label}: {error}; {hint}") from error
        except EngineError as error:
            raise JudgeError(f"{self.label}: {error}") from error
        return JudgeAnswer(
            text=str(response.message.get("content") or ""),
            prompt_tokens=len(response.prompt_token_ids),
            completion_tokens=len(response.token_ids),
            cut_off=response.finish_reason == "length",
        )

    def close(self) -> None:
        self._engine.release()
