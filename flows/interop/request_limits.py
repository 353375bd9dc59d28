"""Limits of the requests to a served environment: size and duration of a body, and strict JSON.

`BoundedRequests` reads a body before the application sees it. Text that Python's parser accepts but other parts reject
(NaN, integers of thousands of digits, lone surrogates, deep nesting) is refused here, for every protocol.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from components.inference.connection import PendingBytes, read_body
from components.strict_json import parse

Refuse = Callable[[int, str], Response]
"""Response of a protocol with a status and a message."""


class BoundedRequests:
    """ASGI middleware. refuse: response to a body that is too large, too slow or not valid JSON. invalid_json: status
    of the last."""

    def __init__(self, app: ASGIApp, refuse: Refuse, invalid_json: int):
        self._app, self._refuse, self._invalid_json = app, refuse, invalid_json
        self._pending = PendingBytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(Request(scope, receive), self._pending)
            if body:
                parse(body)
        except HTTPException as error:
            await self._refuse(error.status_code, str(error.detail))(scope, receive, send)
            return
        except ValueError as error:
            await self._refuse(self._invalid_json, f"the body is not valid JSON: {error}")(scope, receive, send)
            return
        delivered = False

        async def replay() -> Message:
            nonlocal delivered
            if delivered:
                return await receive()  # the end of the connection
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)
