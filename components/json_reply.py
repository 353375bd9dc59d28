"""Reply of a JSON API, what it says about another attempt, and the failure of an attempt."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from components.bounded_reply import LIMITS, ReplyLimits
from components.strict_json import check_structure

AGAIN = {408, 409, 425, 429, *range(500, 600)}
"""HTTP statuses that are retried."""
MAX_QUOTED = 300
"""Characters of a server's message that are quoted."""


class FailedAttempt(Exception):
    """Failed attempt that may succeed when retried."""

    def __init__(self, message: str, *, pause: float | None = None, empty: bool = False, unreachable: bool = False):
        super().__init__(message)
        self.pause = pause
        """Seconds that the server asks to wait; None without a request."""
        self.empty = empty
        self.unreachable = unreachable
        """True if no connection was established: refused, or an unknown host."""


class Reply(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes
    limits: ReplyLimits = LIMITS

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> dict[str, Any]:
        """Return the JSON object of the response. Raise FailedAttempt if it is not a JSON object."""
        try:
            if len(self.content) > 2 * self.limits.values:  # fewer bytes cannot have more values
                check_structure(self.content, self.limits.values)
            body = orjson.loads(self.content)
        except orjson.JSONDecodeError:
            raise FailedAttempt(f"the response is not JSON: {self.text[:MAX_QUOTED]!r}", empty=True) from None
        except ValueError as error:
            raise FailedAttempt(f"the response is not used: {error}", empty=True) from None
        if not isinstance(body, dict):
            raise FailedAttempt(f"the response is not a JSON object: {self.text[:MAX_QUOTED]!r}", empty=True)
        return body

    def error(self) -> tuple[str, str]:
        """Return code and message of OpenAI's error object; without one, an empty code and the response text."""
        try:
            error = orjson.loads(self.content)["error"]
            return str(error.get("code") or ""), str(error.get("message") or "")[:MAX_QUOTED]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "", self.text[:MAX_QUOTED] or self.reason


def packed(body: Any) -> bytes:
    """Return a value as JSON bytes."""
    try:
        return orjson.dumps(body)
    except TypeError:  # orjson rejects lone surrogates and integers of more than 64 bits
        return json.dumps(body).encode()


def asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait; None without a valid number in the headers."""
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(headers[name]) / unit
        except (KeyError, ValueError):
            continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    return None
