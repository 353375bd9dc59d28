"""Which engine generates."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from components.errors import ResourceError
from components.specs import Spec


class EmbeddedSpec(Spec):
    """transformers, in the process of the stage."""

    name: Literal["embedded"] = "embedded"

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys: nothing beyond the model."""
        return {}


class RemoteSpec(Spec):
    """A server that speaks OpenAI's chat completions."""

    name: Literal["remote"] = "remote"
    url: str
    """What OpenAI's clients take as `base_url`: `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """Name under which the server has the model. Policies that are trained are loaded there as adapters with the name
    `MODEL@VERSION`; the server has to see the folder of the run under the same path."""
    key_variable: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the server's key; None sends none."""
    tokens: bool = True
    """Ask for token ids and their log-probabilities (`return_token_ids`), as our own server and vLLM give them.
    Training needs them. Without them any such server can be evaluated."""
    timeout: float = Field(300.0, gt=0)
    """Seconds that one answer may take."""
    retry_for: float = Field(120.0, ge=0)
    """Seconds for which a request that the server fails is sent again, before the episode has failed."""
    max_requests: int | None = Field(None, ge=1)
    """Most requests under way at once; further ones wait. None: as many as episodes are."""

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("an address such as http://127.0.0.1:8000/v1")
        if parts.username or parts.password:
            raise ValueError("an address without user and password; name the variable of a key: inference.key_variable")
        return value.rstrip("/")

    def key(self) -> str:
        """The server's key, from the environment; empty where none is sent. Raises ResourceError where the variable is
        not set."""
        found = os.environ.get(self.key_variable, "") if self.key_variable else ""
        if self.key_variable and not found:
            raise ResourceError(
                f"inference.key_variable: the environment variable {self.key_variable} is not set; set it to the key "
                f"of {self.url}"
            )
        return found

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys: not where the server is, nor how patient we are."""
        return {"inference": {"name": self.name, "model": self.model, "tokens": self.tokens}}


InferenceSpec = Annotated[EmbeddedSpec | RemoteSpec, Field(discriminator="name")]
