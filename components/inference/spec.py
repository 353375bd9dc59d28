"""Which engine generates."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from components.specs import Spec
from components.specs.served import Served


class EmbeddedSpec(Spec):
    """transformers, in the process of the stage."""

    name: Literal["embedded"] = "embedded"

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys: nothing beyond the model."""
        return {}


class RemoteSpec(Served):
    """A server that speaks OpenAI's chat completions."""

    key_path: ClassVar[str] = "inference"

    name: Literal["remote"] = "remote"
    model: str = Field(min_length=1)
    """Name under which the server has the model. Policies that are trained are loaded there as adapters with the name
    `MODEL@VERSION`; the server has to see the folder of the run under the same path."""
    tokens: bool = True
    """Ask for token ids and their log-probabilities (`return_token_ids`), as our own server and vLLM give them.
    Training needs them. Without them any such server can be evaluated."""
    timeout: float = Field(300.0, gt=0)
    """Seconds that one answer may take."""
    retry_for: float = Field(120.0, ge=0)
    """Seconds for which a request that the server fails is sent again, before the episode has failed."""
    max_requests: int | None = Field(None, ge=1)
    """Most requests under way at once; further ones wait. None: as many as episodes are."""

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys: not where the server is, nor how patient we are."""
        return {"inference": {"name": self.name, "model": self.model, "tokens": self.tokens}}


InferenceSpec = Annotated[EmbeddedSpec | RemoteSpec, Field(discriminator="name")]
