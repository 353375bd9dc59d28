"""HTTP server of an application on 127.0.0.1, for programs on this machine, and the limits of its requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from components.errors import ResourceError
from components.inference.connection import PendingBytes, read_body
from components.strict_json import parse

HOST = "127.0.0.1"
STOP = 20.0
"""Seconds to wait for the end of a server in a thread."""


def listen(port: int) -> socket.socket:
    """Return a listening socket. port: 0 for any free one. Raises ResourceError if the port is in use."""
    try:
        return socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ResourceError(
            f"--port {port}: cannot listen on {HOST} ({reason}); choose another port, or 0 for any free one"
        ) from None


def address(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    return f"http://{HOST}:{listener.getsockname()[1]}"


def serve(app: Any, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. ready: called with the URL once the server accepts connections.

    Requests from web pages of other origins, and requests that name another host, are rejected.
    """
    with listener:
        _run(_server(app, listener, ready), listener)


@contextlib.contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """Serve in a thread while the block runs; yield the URL. Raises ResourceError if the port is in use."""
    started = threading.Event()
    with listen(port) as listener:
        server = _server(app, listener, lambda url: started.set())
        thread = threading.Thread(target=lambda: _run(server, listener), daemon=True, name="environment-server")
        thread.start()
        try:
            while not started.wait(0.1):
                if not thread.is_alive():
                    raise ResourceError("the server of the environment did not start; the log has the reason")
            yield address(listener)
        finally:
            server.should_exit = True
            thread.join(STOP)


def _run(server: Any, listener: socket.socket) -> None:
    # Not `Server.run`, which replaces the event loop policy of the whole process.
    asyncio.run(server.serve(sockets=[listener]))


def _server(app: Any, listener: socket.socket, ready: Callable[[str], None]) -> Any:
    import uvicorn

    from components.inference.access import AccessMiddleware
    from components.inference.connection import MAX_BODY_BYTES, BoundedConnection

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready(address(listener))

    access = AccessMiddleware(app, host=HOST, port=listener.getsockname()[1], key=None, option="")
    config = uvicorn.Config(
        access,
        http=BoundedConnection,
        log_config=None,
        log_level="warning",
        access_log=False,
        ws="websockets-sansio",
        ws_max_size=MAX_BODY_BYTES,
        lifespan="on",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    return Announcing(config)


Refuse = Callable[[int, str], Response]
"""Response of a protocol with a status and a message."""


class BoundedRequests:
    """ASGI middleware that reads a body before the application sees it. Text that Python's parser accepts but other
    parts reject (NaN, integers of thousands of digits, lone surrogates, deep nesting) is refused for every protocol.

    refuse: response to a body that is too large, too slow or not valid JSON. invalid_json: status of the last."""

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
