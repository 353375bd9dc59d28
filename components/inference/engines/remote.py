"""The remote engine: a server with OpenAI's chat completions API."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from components.inference.engine_spec import EngineSpec
from components.inference.protocol import EngineHost, ModelEngine, checked
from components.models.spec import ModelSpec
from components.specs.served import ModelEndpoint


class RemoteSpec(ModelEndpoint, EngineSpec):
    """A server with OpenAI's chat completions API."""

    key_path: ClassVar[str] = "inference"

    name: Literal["remote"] = "remote"
    model: str = Field(min_length=1)
    """Served name of the model. Trained policies are loaded as adapters named `MODEL@VERSION`; the server must see the
    run folder under the same path."""
    tokens: bool = True
    """Token ids and log-probabilities in responses (`return_token_ids`), which Espalier's server and vLLM return.
    Training requires them. Without them, any such server can be evaluated."""
    timeout: float = Field(300.0, gt=0)
    """Time limit of one response in seconds."""
    retry_for: float = Field(120.0, ge=0)
    """Period in seconds in which a failed request is retried before the episode fails."""
    max_requests: int | None = Field(None, ge=1)
    """Maximum number of concurrent requests; further requests wait. None: as many as there are episodes."""

    @property
    def needs_model(self) -> bool:
        return False

    @property
    def returns_tokens(self) -> bool:
        return self.tokens

    def require(self) -> None:
        self.key()

    def build(self, model: ModelSpec, host: EngineHost) -> ModelEngine:
        from components.inference.remote import RemoteEngine

        return checked(RemoteEngine(self))

    def key_part(self) -> dict[str, Any]:
        # neither the address nor the time limits
        return {"inference": {"name": self.name, "model": self.model, "tokens": self.tokens}}
