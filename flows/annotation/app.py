"""Web application of the annotation page, served to browsers on this machine.

Access requires a cookie that is HttpOnly and SameSite=Strict. The browser gets it in exchange for a one-time token in
the page's URL (`LoginToken`). The Host header has to name this server, which blocks DNS rebinding. Requests that write
have to come from this server's page (Origin). Bodies are JSON and limited in size. The page loads nothing from other
hosts, and its Content-Security-Policy only allows the scripts served here. Content of episodes is inserted as text,
never as markup.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import components.pages
from components.errors import Problem, ResourceError, SpecError, WaitTimeout
from flows.annotation.session import AnnotationSession

PAGE = Path(__file__).parent / "page"
FILES = {
    "view.js": (PAGE, "text/javascript"),
    "app.js": (PAGE, "text/javascript"),
    "style.css": (PAGE, "text/css"),
    "base.css": (Path(components.pages.__path__[0]) / "templates", "text/css"),
}
"""Folder and type of the files that the page loads; it shares its colours and fonts with the other pages."""
MOST_BYTES = 1 << 20
"""Maximum size of a request's body."""
EXCHANGED = "espalier.exchanged"
"""Key in a request's scope: True if its token was exchanged, so that the response sets the cookie."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LoginToken:
    """One-time token and the cookie that it is exchanged for.

    Others may see the token in a terminal or in a browser's history. After the exchange it is invalid, and the next
    browser needs a new one.
    """

    def __init__(self, on_exchange: Callable[[str], None]):
        """on_exchange: called with the new token after each exchange."""
        self.token = secrets.token_urlsafe(24)
        self.cookie = secrets.token_urlsafe(24)
        self._on_exchange = on_exchange

    def exchange(self, token: str) -> bool:
        """Return True if the token is valid; a new one then replaces it."""
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return False
        self.token = secrets.token_urlsafe(24)
        self._on_exchange(self.token)
        return True

    def accepts(self, cookie: str) -> bool:
        """Return True if the cookie is valid."""
        return hmac.compare_digest(cookie.encode(errors="replace"), self.cookie.encode())


def create_app(session: AnnotationSession, access: LoginToken, port: int) -> ASGIApp:
    """Return the application, to be served on 127.0.0.1 at this port."""
    app = FastAPI(title="Espalier", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    async def page(request: Request) -> Response:
        response = Response((PAGE / "index.html").read_text("utf-8"), media_type="text/html")
        if request.scope.get(EXCHANGED):
            response.set_cookie(cookie_name(port), access.cookie, httponly=True, samesite="strict", path="/")
        return response

    @app.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in FILES:
            return _refusal(404, "unknown file")
        folder, kind = FILES[name]
        return Response((folder / name).read_text("utf-8"), media_type=kind)

    @app.get("/api/state")
    async def state() -> Response:
        return _json(await asyncio.to_thread(session.state))

    @app.get("/api/episode")
    async def episode(id: str, reveal: bool = False) -> Response:
        return _json(await asyncio.to_thread(session.episode, id, reveal))

    @app.post("/api/answer")
    async def answer(request: Request) -> Response:
        saved = await asyncio.to_thread(session.answer, await _body(request))
        return _json({"kept": saved.id})

    @app.post("/api/undo")
    async def undo(request: Request) -> Response:
        undone = await asyncio.to_thread(session.undo)
        return _json({"undone": None if undone is None else {"kind": undone.kind, "trajectory": undone.trajectory}})

    async def refuse(_: Request, error: Exception) -> Response:
        if isinstance(error, SpecError):
            return _refusal(400, "; ".join(str(problem) for problem in error.problems))
        return _refusal(503, f"{error}")

    for kind in (SpecError, ResourceError, WaitTimeout):
        app.add_exception_handler(kind, refuse)
    return LoginMiddleware(app, access, port)


def cookie_name(port: int) -> str:
    """Return the cookie's name, which contains the port because cookies are shared by all ports of a host."""
    return f"espalier-{port}"


class LoginMiddleware:
    """Middleware that rejects requests without cookie or token, from other origins, or with invalid bodies."""

    def __init__(self, app: ASGIApp, access: LoginToken, port: int):
        self.app = app
        self.access = access
        self.hosts = [f"{name}:{port}" for name in ("127.0.0.1", "localhost")]
        self.cookie = cookie_name(port)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no web sockets, no lifespan

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._check(scope, headers)
        if refusal is None:
            try:
                receive = await _read_body(receive) if scope["method"] not in ("GET", "HEAD") else receive
            except _TooLarge:
                refusal = _refusal(413, f"expected at most {MOST_BYTES} bytes")
        await (refusal or self.app)(scope, receive, with_headers)

    def _check(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        host = headers.get("host", "")
        if host not in self.hosts:
            return _refusal(421, f"wrong Host header; expected {self.hosts[0]}")
        if not self._authenticated(scope, headers):
            reason = "the token is missing, wrong or already used; open the URL that the command printed last"
            return _refusal(401, reason)
        if scope["method"] in ("GET", "HEAD"):
            return None
        if headers.get("origin") != f"http://{host}":
            return _refusal(403, "only the page of this server may write")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _refusal(415, "expected application/json")
        if headers.get("content-length", "0").isdecimal() and int(headers.get("content-length", "0")) > MOST_BYTES:
            return _refusal(413, f"expected at most {MOST_BYTES} bytes")
        return None

    def _authenticated(self, scope: Scope, headers: dict[str, str]) -> bool:
        """Return True if the request has the cookie, or a valid token, which is then exchanged for the cookie."""
        with suppress(CookieError):
            cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
            if cookie is not None and self.access.accepts(cookie.value):
                return True
        if scope["path"] != "/" or scope["method"] != "GET":
            return False
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        scope[EXCHANGED] = len(tokens) == 1 and self.access.exchange(tokens[0])
        return bool(scope[EXCHANGED])


class _TooLarge(Exception):
    pass


async def _read_body(receive: Receive) -> Receive:
    """Read the whole body and return a `receive` that replays it. Raises _TooLarge."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
        if len(body) > MOST_BYTES:
            raise _TooLarge
    replayed = False

    async def replay() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _body(request: Request) -> dict[str, Any]:
    try:
        data = json.loads(await request.body())
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise SpecError([Problem("body", "expected a JSON object")])
    return data


def _json(data: Any) -> Response:
    return Response(
        json.dumps(data), media_type="application/json"
    )  # ASCII, because text of models may be invalid UTF-8


def _refusal(status: int, reason: str) -> Response:
    return Response(json.dumps({"error": reason}), status, media_type="application/json")
