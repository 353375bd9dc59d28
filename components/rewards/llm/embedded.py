"""Judge on this machine: a model of its own, or the policy whose episodes are judged."""

from __future__ import annotations

from typing import Any

from components.errors import ContextOverflow, EngineError, JudgeError, ResourceError
from components.inference.protocol import ChatRequest, Sampling
from components.models.spec import LoraSpec
from components.rewards.llm.protocol import JudgeAnswer, Messages
from components.rewards.llm.spec import EmbeddedJudge, PolicyJudge
from components.rewards.protocol import Means


class LocalModelClient:
    """Client of an engine on this machine, without cost. Raises ResourceError if there is no engine."""

    priced = True

    def __init__(self, spec: EmbeddedJudge | PolicyJudge, means: Means):
        if means.engine is None:
            raise ResourceError("a judge on this machine needs an engine; expected Means(engine=...)")
        self._spec = spec
        separate_model = isinstance(spec, EmbeddedJudge)
        self.label = spec.model.name if isinstance(spec, EmbeddedJudge) else "the policy itself"
        model = spec.model.model(spec.context, LoraSpec()) if isinstance(spec, EmbeddedJudge) else None
        self._engine = means.engine(model)
        self.version = "" if separate_model else self._engine.policy

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
        release = getattr(self._engine, "release", None)
        if release is not None:
            release()
