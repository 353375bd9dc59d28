"""Error responses: that of each exception, with the status that clients expect, and the error object of OpenAI, or of
Anthropic below `/v1/messages`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from components.errors import (
    ArtifactError,
    CallLimitReached,
    ContextOverflow,
    EngineBusy,
    EngineError,
    EspalierError,
    PromptRefused,
    SpecError,
    StalePolicy,
    WaitTimeout,
)

MAX_MESSAGE = 2000
"""Maximum length of an error message, which may contain parts of the request."""
MAX_PARAM = 200
"""Maximum length of a parameter's name."""
SHOWN_PROBLEMS = 8
"""Maximum number of problems of a request in the error message."""
MESSAGES = "/v1/messages"
"""Path of Anthropic's API."""
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Kinds of Anthropic's errors by status; others are `invalid_request_error`, or `api_error` from 500."""


def refusal(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    path: str = "",
) -> JSONResponse:
    """Return the error response. Its texts are truncated and valid Unicode. path: of the request."""
    content: dict[str, Any] = {"message": _cut(message, MAX_MESSAGE), "type": kind}
    if path.startswith(MESSAGES):
        content["type"] = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        content = {"type": "error", "error": content}
    else:
        content = {"error": {**content, "param": param and _cut(param, MAX_PARAM), "code": code}}
    # An immediate retry does not help; without the header, OpenAI's client retries 409 and 5xx.
    retry = {"x-should-retry": "false"}
    return JSONResponse(content, status_code=status, headers={**retry, **(headers or {})})


def _cut(text: str, length: int) -> str:
    text = text if len(text) <= length else f"{text[: length - 1]}…"
    return text.encode("utf-8", "backslashreplace").decode()


def message_of(error: Exception) -> str:
    """Return the text of an error for a client: of an unexpected one, its type only."""
    match error:
        case SpecError():
            shown = [str(problem) for problem in error.problems[:SHOWN_PROBLEMS]]
            return "; ".join([*shown, "and more problems"] if len(error.problems) > len(shown) else shown)
        case HTTPException():
            return str(error.detail)
        case EspalierError():
            return str(error)
    return f"internal error ({type(error).__name__}); the server's log has the rest"


async def refuse(request: Request, error: Exception) -> JSONResponse:
    """Return the error object of the request's API, with the status that its clients expect."""
    path = request.url.path
    status, kind, code, param, message, headers = 500, "server_error", None, None, str(error), None
    match error:
        case SpecError():
            status, kind, param = 400, "invalid_request_error", error.problems[0].path
            message = message_of(error)
            if path.startswith(MESSAGES):
                message = message.replace("agent.max_thinking_tokens", "thinking.budget_tokens")
        case ArtifactError():
            status, kind, code = 400, "invalid_request_error", "adapter_not_usable"
        case ContextOverflow():
            message, status, kind, code = str(error.args[0]), 400, "invalid_request_error", "context_length_exceeded"
            if path.startswith(MESSAGES):  # the text by which its clients know that they have to shorten it
                message = f"prompt is too long: {message}"
        case PromptRefused():
            status, kind, code = 400, "invalid_request_error", "prompt_refused"
        case StalePolicy():
            status, kind, code = 409, "invalid_request_error", "stale_policy"
        case EngineBusy():
            status, kind, code = 409, "invalid_request_error", "engine_busy"
        case WaitTimeout():
            status, code = 504, "timeout"
        case CallLimitReached():
            status, kind, code = 403, "invalid_request_error", "calls_used_up"
        case HTTPException():
            status, kind, message = error.status_code, "invalid_request_error", str(error.detail)
            headers = error.headers
            if status == 405 or "endpoint" not in request.scope:
                message = _unknown_route(request, (headers or {}).get("Allow"))
            code = "model_not_found" if status == 404 and message.startswith("the model ") else None
        case EngineError():
            code = "engine_error"
        case _:
            message = message_of(error)
    return refusal(status, message, kind=kind, code=code, param=param, headers=headers, path=path)


def _unknown_route(request: Request, allowed: str | None) -> str:
    """Return the message for a path without a route. allowed: methods of the path, if it has others."""
    where = f"{request.method} {request.url.path}"
    if allowed is not None:
        return f"{where}: this path has no such method; expected {allowed}"
    routes = [
        f"{'/'.join(route.methods or ())} {route.path.replace('{model:path}', 'MODEL')}"
        for route in request.app.routes
        if isinstance(route, APIRoute)
    ]
    return f"{where}: no such route; this server has {', '.join(routes)}"
