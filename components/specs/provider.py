"""Settings that models of providers share: their price, and additional parameters of a request without secrets."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from components.redaction import is_secret
from components.specs.base import Spec

RESERVED_PARAMETERS = {"model", "messages", "tools", "stream", "n", "timeout", "num_retries", "max_retries"}
"""Request parameters that `extra` may not set."""


class PriceSpec(Spec):
    """Price in any currency, the same in the whole experiment."""

    input: float = Field(ge=0)
    """Price of a million prompt tokens."""
    output: float = Field(ge=0)
    """Price of a million completion tokens."""

    def of(self, read: int, written: int) -> float:
        """Return the cost of these numbers of prompt and completion tokens."""
        return (read * self.input + written * self.output) / 1_000_000


def check_extra(extra: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the additional parameters of a request. path: key path of their section. Raises ValueError for a secret or
    a reserved parameter."""
    for name in extra:
        if is_secret(name):
            raise ValueError(f"no secrets such as {name}; name the environment variable instead: {path}.key_variable")
        if name in RESERVED_PARAMETERS:
            raise ValueError(f"parameters other than {name}, which is reserved")
    return extra
