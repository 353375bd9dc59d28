"""Judge model of any provider that LiteLLM supports, at the price that LiteLLM lists or the configuration gives.

LiteLLM sends each request once. Retries and their delays are the same as for a judge behind a URL.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field

from components.chat_client import NO_CREDIT_CODES
from components.errors import JudgeError, ResourceError
from components.json_client import AGAIN, MAX_QUOTED, ClientTimeouts, FailedAttempt, asked_to_wait, patiently
from components.redaction import MASK, dereference, is_secret, secret_variable
from components.rewards.llm.judge_model import PaidSpec
from components.rewards.llm.litellm_import import completion, listed, litellm
from components.rewards.llm.models.served import AnswerFormat, UnsupportedFormat, about_format, of_completion
from components.rewards.llm.protocol import JudgeAnswer, Messages
from components.rewards.protocol import RewardResources
from components.specs.served import VARIABLE

SHORTEST_KEY = 8
"""Minimum length of an environment value that is masked as a key."""


ADDRESS = ("api_base", "base_url")
"""Parameters that set the address of a LiteLLM model."""


class LiteLLMJudge(PaidSpec):
    """Model of any provider that LiteLLM supports."""

    name: Literal["litellm"] = "litellm"
    model: str = Field(pattern=r"^[^/\s]+/\S+$")
    """Name in LiteLLM's form `PROVIDER/MODEL`: `anthropic/claude-sonnet-4-5`."""
    key_variable: str | None = Field(None, pattern=VARIABLE)
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

    def key_part(self) -> dict[str, Any]:
        part = super().key_part()
        return {**part, "extra": {name: value for name, value in self.extra.items() if name not in ADDRESS}}

    def key(self) -> str | None:
        """Return the key; None leaves it to LiteLLM. Raises ResourceError if the key, or a variable that `extra` names,
        is not in the environment."""
        dereference(self.extra, "reward.model.extra")
        if self.key_variable is not None:
            key = secret_variable(self.key_variable)
            if not key:
                raise ResourceError(
                    f"reward.model.key_variable: the environment variable {self.key_variable} is not set; set it to "
                    f"the key for {self.model}"
                )
            return key
        try:
            litellm().get_llm_provider(self.model)
        except litellm().BadRequestError:
            provider = self.model.partition("/")[0]
            raise ResourceError(
                f"reward.model.model={self.model}: LiteLLM knows no provider {provider}; expected one as in "
                "anthropic/claude-sonnet-4-5. A server of your own: judge_model@reward.model=served"
            ) from None
        address = next((self.extra[name] for name in ADDRESS if self.extra.get(name)), None)
        missing = litellm().validate_environment(self.model, api_base=address)["missing_keys"]
        if missing:
            raise ResourceError(
                f"reward.model.model={self.model}: the environment lacks {', '.join(missing)}; set it, or name the "
                "variable that holds the key: reward.model.key_variable=NAME"
            )
        return None


class LiteLLMClient:
    """Client of a LiteLLM model. Raises ResourceError if the provider's key is not in the environment."""

    def __init__(self, spec: LiteLLMJudge):
        self.label = spec.model
        self._spec = spec
        self._key = spec.key()
        self._format = AnswerFormat(spec, spec.model)
        self._patience = ClientTimeouts(spec.timeout, spec.retry_for, "reward.model")
        self.priced = spec.price is not None or listed(spec.model)

    def price(self, read: int, written: int) -> float:
        if self._spec.price is not None:
            return self._spec.price.of(read, written)
        parts = litellm().cost_per_token(self._spec.model, prompt_tokens=read, completion_tokens=written)
        return float(sum(parts))

    async def call(
        self, messages: Messages, schema: dict[str, Any] | None, question_digest: str, immediate: bool
    ) -> JudgeAnswer:
        try:
            return await self._format.ask(
                messages, schema, lambda request, structured: patiently(lambda: self._send(request), self._patience)
            )
        except FailedAttempt as error:
            raise JudgeError(f"{self.label}: {error}") from None

    async def _send(self, request: dict[str, Any]) -> JudgeAnswer:
        import openai

        try:
            result = await completion(
                **request, api_key=self._key, timeout=self._spec.timeout, num_retries=0, max_retries=0
            )
        except openai.OpenAIError as error:  # base class of LiteLLM's errors
            raise self._translated(error, "response_format" in request) from None
        return of_completion(_provider_form(result.model_dump()))

    def _translated(self, error: Any, structured: bool) -> Exception:
        """Return the exception that an error of LiteLLM maps to."""
        errors = litellm()
        text = self._masked(error)
        status = getattr(error, "status_code", None)
        if isinstance(error, errors.ContextWindowExceededError):
            return JudgeError(f"{self.label}: {text}; show the judge less: reward.model.longest={self._spec.longest}")
        if status in (400, 422) and structured and about_format(text):
            return UnsupportedFormat()
        if isinstance(error, errors.UnsupportedParamsError):
            hint = "remove the parameter, for instance +reward.model.extra.temperature=null"
            return ResourceError(f"{self.label}: {text}; {hint}")
        if status in (401, 403):
            variable = self._spec.key_variable or "the one of its provider, or name another: reward.model.key_variable="
            return ResourceError(f"{self.label} refuses the key ({text}); set {variable}")
        if status == 404:
            return ResourceError(f"{self.label} does not exist ({text}); see reward.model.model")
        codes = (getattr(error, "code", None), (getattr(error, "body", None) or {}).get("code"))
        if status == 402 or any(code in NO_CREDIT_CODES for code in codes):
            return ResourceError(f"the account for {self.label} has no credit left ({text})")
        if status in AGAIN or isinstance(error, errors.APIConnectionError):
            return FailedAttempt(text, pause=asked_to_wait(getattr(error, "litellm_response_headers", None) or {}))
        return JudgeError(f"{self.label}: {text}")

    def _masked(self, error: object) -> str:
        """Return the error's text with keys masked, in case the provider repeats one."""
        text = str(error).removeprefix("litellm.")[:MAX_QUOTED]
        for name, value in os.environ.items():
            if len(value) >= SHORTEST_KEY and is_secret(name):
                text = text.replace(value, MASK)
        return text.replace(self._key, MASK) if self._key else text

    def close(self) -> None:
        """Keep LiteLLM's connections open, for the next judge of the same provider."""


def _provider_form(completion: dict[str, Any]) -> dict[str, Any]:
    """Return a completion in the providers' form: LiteLLM moves the refusal elsewhere, and reports 0 tokens if none
    were counted."""
    message = completion["choices"][0]["message"] if completion.get("choices") else {}
    message["refusal"] = (message.get("provider_specific_fields") or {}).get("refusal")
    prompt_tokens = (completion.get("usage") or {}).get("prompt_tokens")
    return completion if prompt_tokens else completion | {"usage": None}
