"""Limits of HTTP connections: size and duration of headers and bodies, and number of connections.

A client that sends slowly, or does not read its responses, occupies only its own connection, for a bounded time. Body
size is measured during reception, so a missing or false Content-Length has no effect. After a rejected request, the
rest of its body is read and discarded for HEAD_SECONDS, so that the client reads the error instead of a broken
connection. h11 limits headers to 64 KiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from components.strict_json import parse

MAX_BODY_BYTES = 4 << 20
"""Maximum size of a request body: 700,000 characters as JSON with every character escaped."""
SMALL_BODY_BYTES = 64 << 10
"""Size in bytes up to which bodies do not count as pending."""
MAX_PENDING_BYTES = 64 << 20
"""Maximum number of bytes of partially received larger bodies."""
HEAD_SECONDS = 20.0
"""Time limit for the headers of a request, from the connection or the first byte."""
BODY_SECONDS = 60.0
"""Time limit for a body."""
UNREAD_SECONDS = 60.0
"""Time limit for a client that does not read a response that fills its buffers."""
MAX_CONNECTIONS = 2048
"""Maximum number of connections; fewer if the process has a lower limit of open files."""
SPARE_FILES = 128
"""File descriptors reserved for the rest of the process."""
_JSON_TYPES = {type(None): "null", bool: "a boolean", str: "a text", list: "an array"}


class PendingBytes:
    """Number of bytes of partially received bodies, over all connections of a server."""

    def __init__(self) -> None:
        self.total = 0


async def read_json_object(request: Request, pending: PendingBytes) -> dict[str, Any]:
    """Return the parsed body. Raises HTTPException if it is too large, too slow, or not a JSON object."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(400, "the body must be a JSON object, sent as application/json")
    body = await read_body(request, pending)
    try:
        value = parse(body)
    except ValueError as error:
        raise HTTPException(400, f"the body must be a JSON object; {error}") from None
    if not isinstance(value, dict):
        raise HTTPException(400, f"the body must be a JSON object; it is {_JSON_TYPES.get(type(value), 'a number')}")
    return value


async def read_body(request: Request, pending: PendingBytes) -> bytes:
    """Return the body's bytes. Raises HTTPException if the body is too large or takes too long."""
    too_large = HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes, the most that this server reads")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > MAX_BODY_BYTES:
        raise too_large
    chunks: list[bytes] = []
    size = counted = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise too_large
                chunks.append(chunk)
                if size > SMALL_BODY_BYTES:
                    pending.total += size - counted
                    counted = size
                    if pending.total > MAX_PENDING_BYTES:
                        retry = {"x-should-retry": "true", "retry-after": "1"}
                        raise HTTPException(503, "too many large requests are being sent; try again", retry)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(499, "the client hung up") from None
    finally:
        pending.total -= counted
    return b"".join(chunks)


def most_connections() -> int:
    """Return the maximum number of connections, limited by the process's open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(min(MAX_CONNECTIONS, files - SPARE_FILES), 1)


class BoundedConnection(H11Protocol):
    """uvicorn's connection with time limits for reading and writing, which sends each part of a response at once."""

    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The body follows the headers in a write of its own, which would wait 40 ms for a delayed acknowledgement.
        # asyncio sets the option only on sockets that were created for TCP by number, not on `socket.create_server`'s.
        with contextlib.suppress(OSError):  # of a connection that is already reset
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > most_connections():
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n\r\n")
            transport.close()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head()
        self._stop_unread()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head()
        elif self._head_timer is None:  # headers of a further request, or the rest of a rejected body
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_unread()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
