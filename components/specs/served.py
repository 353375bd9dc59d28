"""Specs of models behind a network: the address of a server, the environment variable that holds its key, the price,
and additional parameters of a request without secrets.

An address with a user or a password is rejected, because it would be stored, logged and tracked. A configuration names
the environment variable of a key, never the key.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from components.errors import BoundaryError, ResourceError
from components.json_client import ChatClient
from components.redaction import is_secret, secret_variable
from components.retry import ClientTimeouts
from components.specs.base import Spec
from components.specs.marks import ENV_VARIABLE, SERVER

SERVER_KEY_VARIABLE = "ESPALIER_SERVER_KEY"
"""Environment variable with the key of Espalier's own server (`python -m components.inference.server`)."""
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""Name of an environment variable."""


def check_address(value: str, example: str = "http://127.0.0.1:8000/v1", key: str = "") -> None:
    """Raise ValueError for an invalid address, without repeating it. key: configuration key that names a key's
    variable; empty without one."""
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        raise ValueError(f"an address such as {example}") from None
    if parts.username is not None or parts.password is not None:
        hint = f"; name the variable of a key: {key}" if key else ""
        raise ValueError(f"an address without user and password{hint}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"an address such as {example}")


def key_of(variable: str | None, key_path: str, server: str) -> str:
    """Return the key in an environment variable; empty without a variable. Raise ResourceError if it is not set."""
    key = secret_variable(variable) if variable else ""
    if variable and not key:
        raise ResourceError(
            f"{key_path}.key_variable: the environment variable {variable} is not set; set it to the key of {server}"
        )
    return key


def key_hint(variable: str | None, key_path: str) -> str:
    """Return the remedy for a rejected key."""
    return f"set {variable or f'one: {key_path}.key_variable=NAME'}"


class ModelEndpoint(Spec):
    """A model behind a URL that speaks OpenAI's chat completions."""

    key_path: ClassVar[str]
    """Key path of the section, for messages."""

    url: Annotated[str, SERVER]
    """Base URL as OpenAI's clients take it (`base_url`): `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """Name of the model on the server."""
    key_variable: Annotated[str | None, ENV_VARIABLE] = Field(None, pattern=VARIABLE)
    """Environment variable that holds the server's key; null sends none."""

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        check_address(value, key=f"{cls.key_path}.key_variable")
        return value.rstrip("/")

    def key(self) -> str:
        """Return the server's key; empty without a variable. Raise ResourceError if the variable is not set."""
        return key_of(self.key_variable, self.key_path, f"{self.url}{self.or_else()}")

    def client(
        self,
        timeout: float,
        retry_for: float,
        error: type[BoundaryError],
        at_once: int | None = None,
        wait_for: float | None = None,
    ) -> ChatClient:
        """Return a client of the server. Raise ResourceError if the variable of the key is not set.

        timeout, retry_for: seconds for one response, and for which a failed request is retried. error: raised when a
        request has failed for good. at_once: limit on concurrent requests; None is no limit. wait_for: seconds to wait
        for a server that has not answered yet; None: 0, and the section has no such key."""
        patience = ClientTimeouts(timeout, retry_for, self.key_path, wait_for)
        hint = key_hint(self.key_variable, self.key_path)
        return ChatClient(self.url, self.key(), patience, key_hint=hint, error=error, at_once=at_once)

    @classmethod
    def or_else(cls) -> str:
        """Return an alternative to setting the key, as a clause for the error message; empty without one."""
        return ""


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
