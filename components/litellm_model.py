"""Model of any provider that LiteLLM supports, as judges and the inference engine use it: its key, its price, one call,
and the meaning of its errors.

LiteLLM sends each request once. The caller retries (`components.request_retry.retry_with_backoff`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from components.bounded_reply import InvalidReply, LateReply
from components.chat_client import NO_CREDIT_CODES
from components.errors import ResourceError
from components.exceptions import never_connected
from components.json_reply import AGAIN, MAX_QUOTED, FailedAttempt, asked_to_wait
from components.litellm_import import completion, litellm
from components.redaction import MASK, dereference, is_secret, secret_variable
from components.request_retry import record_contact

PROVIDER_MODEL = r"^[^/\s]+/\S+$"
"""Name of a model in LiteLLM's form `PROVIDER/MODEL`."""
SHORTEST_KEY = 8
"""Minimum length of an environment value that is masked as a key."""
ADDRESS = ("api_base", "base_url")
"""Parameters that set the address of a LiteLLM model."""


@dataclass(frozen=True)
class LiteLLMModel:
    """A model, and the keys of the configuration that messages refer to."""

    name: str
    """`PROVIDER/MODEL`."""
    path: str
    """Key path of the model's section, such as `inference`."""
    own_server: str
    """Override that selects a server of the user's own."""
    key_variable: str | None
    """Environment variable that holds the provider's key; None uses LiteLLM's default variable."""
    extra: dict[str, Any]
    """Additional parameters of a request."""

    def key(self) -> str | None:
        """Return the key; None leaves it to LiteLLM. Raises ResourceError if the key, or a variable that `extra` names,
        is not in the environment."""
        dereference(self.extra, f"{self.path}.extra")
        if self.key_variable is not None:
            key = secret_variable(self.key_variable)
            if not key:
                raise ResourceError(
                    f"{self.path}.key_variable: the environment variable {self.key_variable} is not set; set it to "
                    f"the key for {self.name}"
                )
            return key
        try:
            litellm().get_llm_provider(self.name)
        except litellm().BadRequestError:
            provider = self.name.partition("/")[0]
            raise ResourceError(
                f"{self.path}.model={self.name}: LiteLLM knows no provider {provider}; expected one as in "
                f"anthropic/claude-sonnet-4-5. A server of your own: {self.own_server}"
            ) from None
        address = self._address
        missing = litellm().validate_environment(self.name, api_base=address)["missing_keys"]
        if missing:
            raise ResourceError(
                f"{self.path}.model={self.name}: the environment lacks {', '.join(missing)}; set it, or name the "
                f"variable that holds the key: {self.path}.key_variable=NAME"
            )
        return None

    @property
    def server(self) -> str:
        """Return the name of the server: the model, and its address if one is set."""
        address = self._address
        return f"{self.name} at {address}" if address else self.name

    @property
    def _address(self) -> Any:
        return next((self.extra[name] for name in ADDRESS if self.extra.get(name)), None)

    def listed_price(self, read: int, written: int) -> float:
        """Return the cost of these numbers of prompt and completion tokens by LiteLLM's price table."""
        return float(sum(litellm().cost_per_token(self.name, prompt_tokens=read, completion_tokens=written)))

    async def send(self, request: dict[str, Any], key: str | None, timeout: float) -> dict[str, Any]:
        """Send a request once and return the completion in the providers' form. Raises openai.OpenAIError, the base
        class of LiteLLM's errors, which `translated` maps."""
        try:
            result = await completion(**request, api_key=key, timeout=timeout, num_retries=0, max_retries=0)
        except LateReply:
            raise FailedAttempt(f"timed out: no answer within {timeout:g} s ({self.path}.timeout)") from None
        except InvalidReply as error:
            raise FailedAttempt(f"the server {error}", empty=True) from None
        record_contact(self.server)
        return _provider_form(result.model_dump())

    def translated(self, error: Any, key: str | None) -> Exception | None:
        """Return the exception for an error that concerns every request (ResourceError) or may pass (FailedAttempt);
        None for any other error."""
        errors = litellm()
        text = self.masked(error, key)
        status = getattr(error, "status_code", None)
        unreachable = never_connected(error)
        # LiteLLM reports a refused connection with status 500, which no server has sent
        if status is not None and not unreachable and not isinstance(error, errors.APIConnectionError | errors.Timeout):
            record_contact(self.server)
        if isinstance(error, errors.UnsupportedParamsError):
            hint = f"remove the parameter, for instance +{self.path}.extra.temperature=null"
            return ResourceError(f"{self.name}: {text}; {hint}")
        if status in (401, 403):
            variable = self.key_variable or f"the one of its provider, or name another: {self.path}.key_variable="
            return ResourceError(f"{self.name} refuses the key ({text}); set {variable}")
        if status == 404:
            return ResourceError(f"{self.name} does not exist ({text}); see {self.path}.model")
        codes = (getattr(error, "code", None), (getattr(error, "body", None) or {}).get("code"))
        if status == 402 or any(code in NO_CREDIT_CODES for code in codes):
            return ResourceError(f"the account for {self.name} has no credit left ({text})")
        if status in AGAIN or isinstance(error, errors.APIConnectionError):
            pause = asked_to_wait(getattr(error, "litellm_response_headers", None) or {})
            return FailedAttempt(text, pause=pause, unreachable=unreachable)
        return None

    def masked(self, error: object, key: str | None) -> str:
        """Return the error's text with keys masked, in case the provider repeats one."""
        text = str(error).removeprefix("litellm.")[:MAX_QUOTED]
        for name, value in os.environ.items():
            if len(value) >= SHORTEST_KEY and is_secret(name):
                text = text.replace(value, MASK)
        return text.replace(key, MASK) if key else text


def _provider_form(completion: dict[str, Any]) -> dict[str, Any]:
    """Return a completion in the providers' form: LiteLLM moves the refusal elsewhere, and reports 0 tokens if none
    were counted."""
    message = completion["choices"][0]["message"] if completion.get("choices") else {}
    message["refusal"] = (message.get("provider_specific_fields") or {}).get("refusal")
    prompt_tokens = (completion.get("usage") or {}).get("prompt_tokens")
    return completion if prompt_tokens else completion | {"usage": None}
