"""Error responses with OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

MAX_MESSAGE = 2000
"""Maximum length of an error message, which may contain parts of the request."""
MAX_PARAM = 200
"""Maximum length of a parameter's name."""


def refusal(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the error response. Its texts are truncated and valid Unicode."""
    error = {"message": _cut(message, MAX_MESSAGE), "type": kind, "param": param and _cut(param, MAX_PARAM)}
    # An immediate retry does not help; without the header, OpenAI's client retries 409 and 5xx.
    retry = {"x-should-retry": "false"}
    return JSONResponse({"error": {**error, "code": code}}, status_code=status, headers={**retry, **(headers or {})})


def _cut(text: str, length: int) -> str:
    text = text if len(text) <= length else f"{text[: length - 1]}…"
    return text.encode("utf-8", "backslashreplace").decode()
