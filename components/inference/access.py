"""Access control of the server: Host, Origin and API key are checked before routing.

On a loopback address, the Host header must name a loopback address and the server's port, because a web page whose name
is rebound to 127.0.0.1 (DNS rebinding) still sends its own name. On any other address, an API key is required, and the
operator may list the allowed hosts. Requests from web pages of other origins are rejected on both, and CORS headers are
never sent. `/health` needs no key, so that readiness probes work without the secret.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from components.errors import ResourceError
from components.inference.refusals import refusal
from components.specs.served import SERVER_KEY_VARIABLE

SHORTEST_KEY = 16
"""Minimum length of an API key in characters."""
WITHOUT_KEY = ("/health",)
"""Paths that need no API key."""
DEFAULT_PORTS = {"http": 80, "https": 443}


def is_loopback(host: str) -> bool:
    """Return True for a loopback address or name."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_key(host: str, key: str | None, prefix: str = "") -> None:
    """Raise ResourceError if a server on `host` requires an API key and has none, or an invalid one. prefix: beginning
    of the keys that its clients accept."""
    length = f"at least {SHORTEST_KEY} printable ASCII characters without spaces"
    length += f", which begin with {prefix}" if prefix else ""
    if key is None:
        if not is_loopback(host):
            raise ResourceError(
                f"--host {host}: an address that other machines can reach requires an API key. Set the environment "
                f"variable {SERVER_KEY_VARIABLE} to a secret of {length}, or use --host 127.0.0.1"
            )
    elif len(key) < SHORTEST_KEY or not key.startswith(prefix) or not re.fullmatch("[!-~]*", key):
        raise ResourceError(
            f"{SERVER_KEY_VARIABLE}: expected {length}; got {len(key)} characters. Generate one: "
            f"python -c \"import secrets; print('{prefix}' + secrets.token_urlsafe(32))\""
        )


def key_from_environment() -> str | None:
    """Return the server's API key; None if the variable is not set or empty."""
    return os.environ.get(SERVER_KEY_VARIABLE) or None


class AccessMiddleware:
    """ASGI middleware that forwards allowed requests and rejects the others.

    host, port: address of the server. key: API key that clients send as `Authorization: Bearer KEY`, or as `X-Api-Key:
    KEY` if they are Anthropic's; None requires no key. allowed_hosts: additional values of Host, `NAME` (any port) or
    `NAME:PORT`; if empty, a non-loopback address allows any Host. option: command-line option that allows more hosts,
    for the message; empty if there is none.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        key: str | None,
        allowed_hosts: Collection[str] = (),
        option: str = "--allowed-host NAME",
    ):
        self._app = app
        self._port = port
        self._key = key.encode() if key is not None else None
        self._allowed = {name.lower() for name in allowed_hosts}
        self._remedy = f", or start it with {option}" if option else ""
        self._any_host = not is_loopback(host) and not self._allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] in ("http", "websocket") else None
        if error is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before the handshake: HTTP 403
        else:
            status, message, code = error
            headers = {"www-authenticate": "Bearer"} if status == 401 else {}
            response = refusal(status, message, code=code, headers=headers, path=scope["path"])
            await response(scope, receive, send)

    def _error(self, scope: Scope) -> tuple[int, str, str] | None:
        """Return status, message and code of an error, or None for an allowed request."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        hosts = [value.decode("latin-1") for value in headers.get(b"host", [])]
        if len(hosts) != 1 or not self._host_allowed(hosts[0]):
            shown = hosts[0][:100] if hosts else ""
            message = (
                f"Host: {shown!r} is not this server. Use its address 127.0.0.1 or localhost with port {self._port}"
                f"{self._remedy}"
            )
            return 421, message, "host_not_allowed"
        if any(not _same_origin(origin.decode("latin-1"), hosts[0]) for origin in headers.get(b"origin", [])):
            return 403, "requests from web pages of other origins are refused", "origin_not_allowed"
        if self._key is not None and scope["path"] not in WITHOUT_KEY:
            authorization = headers.get(b"authorization", [])
            scheme, _, key = authorization[0].partition(b" ") if len(authorization) == 1 else (b"", b"", b"")
            keys = [key.strip()] if scheme.lower() == b"bearer" else headers.get(b"x-api-key", [])
            if len(keys) != 1 or not hmac.compare_digest(keys[0], self._key):
                return (
                    401,
                    "the key is missing or wrong; send it as Authorization: Bearer KEY, or X-Api-Key",
                    "invalid_api_key",
                )
        return None

    def _host_allowed(self, host: str) -> bool:
        if self._any_host:
            return True
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname or "", parts.port or DEFAULT_PORTS["http"]
        except ValueError:
            return False
        if parts.netloc != host or parts.username is not None:
            return False
        if self._allowed & {name, host.lower(), f"{name}:{port}"}:
            return True
        return is_loopback(name) and port == self._port


def _same_origin(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in DEFAULT_PORTS and parts.netloc.lower() == host.lower()
