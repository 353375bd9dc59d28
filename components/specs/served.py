"""What a server is, in a configuration: where it is, and the name of the variable that holds its key.

An address with a user or a password would be stored, logged and tracked with them: it is refused. A key is never
written down, only the environment variable that holds it.
"""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from components.errors import ResourceError
from components.redaction import secret_variable
from components.specs.base import Spec

SERVER_KEY_VARIABLE = "ESPALIER_SERVER_KEY"
"""Environment variable that holds the key of a server of our own (`python -m components.inference.server`)."""
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""Name of an environment variable."""


def check_address(value: str, example: str = "http://127.0.0.1:8000/v1", key: str = "") -> None:
    """Raises ValueError, which says what was expected and repeats nothing. key: what takes the name of a key's
    variable, if anything does."""
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
    """The key in an environment variable; empty where none is named. Raises ResourceError where it is not set."""
    found = secret_variable(variable) if variable else ""
    if variable and not found:
        raise ResourceError(
            f"{key_path}.key_variable: the environment variable {variable} is not set; set it to the key of {server}"
        )
    return found


class Served(Spec):
    """A model behind a URL that speaks OpenAI's chat completions."""

    key_path: ClassVar[str]
    """Where it stands in a configuration."""

    url: str
    """What OpenAI's clients take as `base_url`: `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """Name under which the server has the model."""
    key_variable: str | None = Field(None, pattern=VARIABLE)
    """Environment variable that holds the server's key; null sends none."""

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        check_address(value, key=f"{cls.key_path}.key_variable")
        return value.rstrip("/")

    def key(self) -> str:
        """The server's key; empty where none is sent. Raises ResourceError where the variable is not set."""
        return key_of(self.key_variable, self.key_path, f"{self.url}{self.or_else()}")

    @classmethod
    def or_else(cls) -> str:
        """What else one can do without the model; empty or a clause."""
        return ""
