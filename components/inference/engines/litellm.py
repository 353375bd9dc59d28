"""The LiteLLM engine: a prompted model of any provider that LiteLLM supports, for evaluations and comparisons.

Providers return no token ids, so nothing can be trained on their answers. Each answer has the token counts that the
provider reports, and its cost by the configured or LiteLLM's price.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from components.errors import EngineError, ResourceError, StalePolicy
from components.inference.engine_spec import EngineSpec
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest, EngineHost, ModelEngine
from components.inference.remote_chat import body_of, message_of, usage_of
from components.json_client import fail_on_invalid_answer
from components.litellm_client import ADDRESS, PROVIDER_MODEL, LiteLLMClient, LiteLLMModel, listed
from components.models.spec import ModelSpec
from components.redaction import dereference
from components.retry import ClientTimeouts
from components.specs.marks import ENV_VARIABLE, SERVER
from components.specs.served import VARIABLE, PriceSpec, check_extra


class LiteLLMSpec(EngineSpec):
    """A model of any provider that LiteLLM supports."""

    name: Literal["litellm"] = "litellm"
    model: Annotated[str, SERVER] = Field(pattern=PROVIDER_MODEL)
    """Name in LiteLLM's form `PROVIDER/MODEL`: `anthropic/claude-sonnet-4-5`."""
    key_variable: Annotated[str | None, ENV_VARIABLE] = Field(None, pattern=VARIABLE)
    """Environment variable that holds the provider's key; null uses LiteLLM's default variable."""
    price: PriceSpec | None = None
    """Price of the model; null uses LiteLLM's price table. Without either, the cost is unknown."""
    extra: Annotated[dict[str, Any], SERVER] = {}
    """Additional parameters of each request, such as `reasoning_effort`. With null, a default parameter is removed:
    `extra: {temperature: null}`. A secret is given by the name of its environment variable: `env:NAME`."""
    timeout: float = Field(300.0, gt=0)
    """Time limit of one response in seconds."""
    retry_for: float = Field(120.0, ge=0)
    """Period in seconds in which a failed request is retried before the episode fails."""
    wait_for: float = Field(0.0, ge=0)
    """Seconds to wait for a server that has not answered yet, such as one that is starting. With 0, a refused
    connection or an unknown host is an error at first contact."""

    @field_validator("extra")
    @classmethod
    def _no_secrets(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_extra(value, "inference")

    @property
    def needs_model(self) -> bool:
        return False

    @property
    def returns_tokens(self) -> bool:
        return False

    @property
    def loads_policies(self) -> bool:
        return False

    def check_prerequisites(self) -> None:
        self.remote_model().key()

    def build(self, model: ModelSpec, host: EngineHost) -> ModelEngine:
        return LiteLLMEngine(self)

    def remote_model(self) -> LiteLLMModel:
        """Return the model as LiteLLM calls it."""
        return LiteLLMModel(self.model, "inference", "inference=remote", self.key_variable, self.extra)

    def key_part(self) -> dict[str, Any]:
        extra = {name: value for name, value in self.extra.items() if name not in ADDRESS}
        return {"inference": {"name": self.name, "model": self.model, "extra": extra}}


class LiteLLMEngine:
    """A prompted model of a provider. Raises ResourceError if the provider's key is not in the environment."""

    policy = BASE_POLICY

    def __init__(self, spec: LiteLLMSpec):
        self.spec = spec
        self._model = spec.remote_model()
        patience = ClientTimeouts(spec.timeout, spec.retry_for, "inference", spec.wait_for)
        self._client = LiteLLMClient(self._model, patience, EngineError)
        self._priced = spec.price is not None or listed(spec.model)

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the response to a request. Raises StalePolicy, ContextOverflow, EngineError, and ResourceError for
        errors that affect every request."""
        if request.policy != self.policy:
            raise StalePolicy(f"asked for policy {request.policy}, but a provider's model is never trained")
        body = body_of(request, self.spec.model)
        body |= dereference(self.spec.extra, "inference.extra")
        return await self._client.complete(
            {name: value for name, value in body.items() if value is not None}, self._completion
        )

    def load_policy(self, version: str, folder: str | None) -> None:
        """Do nothing for the base model. Raises ResourceError for any other policy."""
        if version != BASE_POLICY:
            raise ResourceError(
                f"inference.model={self.spec.model}: a provider's model cannot load a trained policy; set "
                "inference=embedded, vllm or remote"
            )

    def release(self) -> None:
        """Do nothing: this process has no resources to release."""

    def close(self) -> None:
        self._client.close()

    def _completion(self, body: dict[str, Any]) -> ChatCompletion:
        with fail_on_invalid_answer():
            message, reason = message_of(body["choices"][0])
        return ChatCompletion(message, reason, [], [], [], self.policy, usage_of(body, self._cost))

    def _cost(self, read: int, written: int) -> float | None:
        if self.spec.price is not None:
            return self.spec.price.of(read, written)
        return self._model.listed_price(read, written) if self._priced else None
