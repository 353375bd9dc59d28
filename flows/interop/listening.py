"""HTTP server of an application on 127.0.0.1, for programs on this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from components.errors import ResourceError

HOST = "127.0.0.1"


def listen(port: int) -> socket.socket:
    """Return a listening socket. port: 0 for any free one. Raises ResourceError if the port is in use."""
    try:
        return socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ResourceError(
            f"--port {port}: cannot listen on {HOST} ({reason}); choose another port, or 0 for any free one"
        ) from None


def serve(app: Any, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. ready: called with the URL once the server accepts connections.

    Requests from web pages of other origins, and requests that name another host, are rejected.
    """
    import uvicorn

    from components.inference.access import AccessMiddleware

    port = listener.getsockname()[1]

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready(f"http://{HOST}:{port}")

    access = AccessMiddleware(app, host=HOST, port=port, key=None, option="")
    config = uvicorn.Config(
        access,
        log_config=None,
        log_level="warning",
        access_log=False,
        ws="websockets-sansio",
        lifespan="on",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    with listener:
        Announcing(config).run(sockets=[listener])
