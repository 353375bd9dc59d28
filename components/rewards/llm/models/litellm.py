"""Judge model of any provider that LiteLLM supports, at the price that LiteLLM lists or the configuration gives.

Retries and their delays are the same as for a judge behind a URL.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import JudgeError, ResourceError
from components.json_reply import FailedAttempt
from components.litellm_import import listed, litellm
from components.litellm_model import ADDRESS, PROVIDER_MODEL, LiteLLMModel
from components.request_retry import ClientTimeouts, retry_with_backoff
from components.rewards.llm.judge_model import PaidSpec
from components.rewards.llm.models.served import AnswerFormat, UnsupportedFormat, about_format, of_completion
from components.rewards.llm.protocol import JudgeAnswer, Messages
from components.rewards.protocol import RewardResources
from components.specs.marks import ENV_VARIABLE, SERVER
from components.specs.served import VARIABLE


class LiteLLMJudge(PaidSpec):
    """Model of any provider that LiteLLM supports."""

    name: Literal["litellm"] = "litellm"
    model: Annotated[str, SERVER] = Field(pattern=PROVIDER_MODEL)
    """Name in LiteLLM's form `PROVIDER/MODEL`: `anthropic/claude-sonnet-4-5`."""
    key_variable: Annotated[str | None, ENV_VARIABLE] = Field(None, pattern=VARIABLE)
    """Environment variable that holds the provider's key; null uses LiteLLM's default variable."""

    @property
    def label(self) -> str:
        return self.model

    def build(self, resources: RewardResources) -> LiteLLMClient:
        return LiteLLMClient(self)

    def check_prerequisites(self, budget: float | None) -> None:
        self.key()
        if budget is not None and self.price is None and not listed(self.model):
            raise ResourceError(
                f"judge.budget={budget:g} cannot be enforced: LiteLLM has no price for {self.model}; expected its "
                "price per million tokens, reward.model.price={input: 2.0, output: 8.0}, or judge.budget=null"
            )

    def estimated_cost(self, read: int, written: int) -> float | None:
        if self.price is None and listed(self.model):
            return self.remote_model().listed_price(read, written)
        return super().estimated_cost(read, written)

    def key_part(self) -> dict[str, Any]:
        part = super().key_part()
        return {**part, "extra": {name: value for name, value in self.extra.items() if name not in ADDRESS}}

    def key(self) -> str | None:
        """Return the key; None leaves it to LiteLLM. Raises ResourceError if it is not in the environment."""
        return self.remote_model().key()

    def remote_model(self) -> LiteLLMModel:
        """Return the model as LiteLLM calls it."""
        own_server = "judge_model@reward.model=served"
        return LiteLLMModel(self.model, "reward.model", own_server, self.key_variable, self.extra)


class LiteLLMClient:
    """Client of a LiteLLM model. Raises ResourceError if the provider's key is not in the environment."""

    def __init__(self, spec: LiteLLMJudge):
        self.label = spec.model
        self._spec = spec
        self._model = spec.remote_model()
        self._key = self._model.key()
        self._format = AnswerFormat(spec, spec.model)
        self._patience = ClientTimeouts(spec.timeout, spec.retry_for, "reward.model", spec.wait_for)
        self.priced = spec.price is not None or listed(spec.model)

    def price(self, read: int, written: int) -> float:
        if self._spec.price is not None:
            return self._spec.price.of(read, written)
        return self._model.listed_price(read, written)

    async def call(
        self, messages: Messages, schema: dict[str, Any] | None, question_digest: str, immediate: bool
    ) -> JudgeAnswer:
        try:
            return await self._format.ask(
                messages,
                schema,
                lambda request, structured: retry_with_backoff(
                    lambda: self._send(request), self._patience, self._model.server
                ),
            )
        except FailedAttempt as error:
            raise JudgeError(f"{self.label}: {error}") from None

    async def _send(self, request: dict[str, Any]) -> JudgeAnswer:
        import openai

        try:
            answer = await self._model.send(request, self._key, self._spec.timeout)
        except openai.OpenAIError as error:
            raise self._translated(error, "response_format" in request) from None
        return of_completion(answer)

    def _translated(self, error: Any, structured: bool) -> Exception:
        """Return the exception that an error of LiteLLM maps to."""
        text = self._model.masked(error, self._key)
        if isinstance(error, litellm().ContextWindowExceededError):
            return JudgeError(f"{self.label}: {text}; show the judge less: reward.model.longest={self._spec.longest}")
        if getattr(error, "status_code", None) in (400, 422) and structured and about_format(text):
            return UnsupportedFormat()
        return self._model.translated(error, self._key) or JudgeError(f"{self.label}: {text}")

    def close(self) -> None:
        """Keep LiteLLM's connections open, for the next judge of the same provider."""
