"""A judge of any provider that LiteLLM knows, at the price that LiteLLM knows or the configuration says.

LiteLLM sends each request once; how long one is sent again, and after what pause, is the same as for a judge behind a
URL.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

from components.client import FIRST_PAUSE, LONGEST_PAUSE, Failed
from components.errors import JudgeError, ResourceError
from components.rewards.asking.asker import Answer, Messages
from components.rewards.asking.served import LESS, Structured, body, of_completion
from components.rewards.asking.spec import LiteLLMJudge


class Provided:
    """Raises ResourceError where the provider's key is not in the environment."""

    def __init__(self, spec: LiteLLMJudge):
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # prices that came with it: no call at import
        import litellm

        self._spec = spec
        self._key = spec.key()
        self._litellm = litellm
        self._structured: Structured = spec.structured
        self.who = spec.model
        self.price = spec.price
        self.price_known = spec.price is not None or _priced(spec.model)

    async def call(self, messages: Messages, schema: dict[str, Any] | None) -> Answer:
        structured: Structured = self._structured if schema is not None else "none"
        passing: tuple[type[Exception], ...] = (Failed, *self._passing())
        deadline = None
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._once(messages, schema, structured)
            except passing as error:
                now = time.monotonic()
                deadline = deadline or now + self._spec.retry_for
                wait = _asked_to_wait(error) or random.uniform(0.5, 1.0) * pause
                if now + wait > deadline:
                    patience = f"sent again for {self._spec.retry_for:g} s (reward.model.retry_for)"
                    raise JudgeError(f"{self.who}: {self._printable(error)}; {patience}") from None
                await asyncio.sleep(wait)
                pause = min(2 * pause, LONGEST_PAUSE)
            except self._litellm.ContextWindowExceededError as error:
                less = f"show the judge less: reward.model.longest={self._spec.longest}"
                raise JudgeError(f"{self.who}: {self._printable(error)}; {less}") from None
            except (self._litellm.BadRequestError, self._litellm.UnprocessableEntityError) as error:
                if structured not in LESS or ("format" not in str(error) and "schema" not in str(error)):
                    raise JudgeError(f"{self.who}: {self._printable(error)}") from None
                structured = self._structured = LESS[structured]

    async def _once(self, messages: Messages, schema: dict[str, Any] | None, structured: Structured) -> Answer:
        errors = self._litellm
        sent = body(self._spec, self._spec.model, messages, schema, structured)
        try:
            found = await errors.acompletion(
                **sent, api_key=self._key, timeout=self._spec.timeout, num_retries=0, max_retries=0
            )
        except (errors.AuthenticationError, errors.PermissionDeniedError, errors.NotFoundError) as error:
            raise ResourceError(
                f"{self.who} cannot be asked: {self._printable(error)}; see reward.model.model and "
                "reward.model.key_variable"
            ) from None
        answer = of_completion(found.model_dump())
        if not self.price_known or self.price is not None:
            return answer
        return Answer(**{**vars(answer), "cost": self._cost(found)})

    def _cost(self, found: Any) -> float | None:
        try:
            return float(self._litellm.completion_cost(found, model=self._spec.model))
        except Exception:  # noqa: BLE001  it raises Exception itself where it knows no price
            return None

    def _passing(self) -> tuple[type[Exception], ...]:
        errors = self._litellm
        return (
            errors.RateLimitError,
            errors.APIConnectionError,
            errors.InternalServerError,
            errors.ServiceUnavailableError,
            errors.Timeout,
        )

    def _printable(self, error: object) -> str:
        text = str(error)[:300]
        return text.replace(self._key, "***") if self._key else text

    def close(self) -> None:
        """Nothing is held here."""


def _priced(model: str) -> bool:
    import litellm

    known = litellm.model_cost
    return model in known or model.partition("/")[2] in known


def _asked_to_wait(error: Exception) -> float | None:
    """Seconds of a Retry-After header, where the provider sent one."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    try:
        return max(float(headers.get("retry-after", "")), 0.0)
    except ValueError:
        return None
