"""Refusals in the form of OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

MAX_MESSAGE = 2000
"""Most characters of an error message: it may repeat what a client sent."""
MAX_PARAM = 200


def refusal(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the response with the error, its texts cut to a bounded length and made valid Unicode."""
    error = {"message": _cut(message, MAX_MESSAGE), "type": kind, "param": param and _cut(param, MAX_PARAM)}
    # Nothing changes by asking again at once; without the header OpenAI's client would, on 409 and 5xx.
    retry = {"x-should-retry": "false"}
    return JSONResponse({"error": {**error, "code": code}}, status_code=status, headers={**retry, **(headers or {})})


def _cut(text: str, length: int) -> str:
    text = text if len(text) <= length else f"{text[: length - 1]}…"
    return text.encode("utf-8", "backslashreplace").decode()
