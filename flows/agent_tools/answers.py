"""Answers of the tools: data without secrets."""

from __future__ import annotations

import os
from typing import Any

from components.redaction import MASK, is_secret, mask

SHORTEST = 6
"""Minimum length of a masked value of an environment variable in characters."""


def masked(answer: Any) -> Any:
    """Return the answer with masked secrets: those that their key or format shows, and the values of environment
    variables whose name denotes a secret."""
    secrets = [value for name, value in os.environ.items() if is_secret(name) and len(value) >= SHORTEST]
    return _without(mask(answer), sorted(secrets, key=len, reverse=True))


def _without(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, dict):
        return {_without(key, secrets): _without(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without(item, secrets) for item in value]
    return value
