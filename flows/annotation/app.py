"""The page on which people read episodes, served to one browser of this machine.

Who may speak to it: whoever has the cookie, which no script reads and no other site's request carries. It is given in
exchange for a token that is in the URL of the page and works once (`Access`). The Host header must name this server (a
page of a stranger whose name is made to resolve to 127.0.0.1 names another), and what writes must come from our own
page (Origin). Bodies are JSON and small. The page loads nothing from elsewhere, and its policy forbids scripts that are
not our file; what episodes say is put into it as text, never as markup.
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

from components.errors import Problem, ResourceError, SpecError, WaitTimeout
from flows.annotation.session import Session

PAGE = Path(__file__).parent / "page"
FILES = {"app.js": "text/javascript", "style.css": "text/css"}
MOST_BYTES = 1 << 20
"""Of the body of a request."""
EXCHANGED = "espalier.exchanged"
"""Key of a request's scope: whether its token was exchanged, so that the answer sets the cookie."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Access:
    """A token that works once, and the cookie that it is exchanged for.

    The token may be seen by others: in a terminal, in a browser's history. After the exchange it is worth nothing, and
    there is a new one for the next browser.
    """

    def __init__(self, exchanged: Callable[[str], None]):
        """exchanged: called with the new token after each exchange."""
        self.token = secrets.token_urlsafe(24)
        self.cookie = secrets.token_urlsafe(24)
        self._exchanged = exchanged

    def exchange(self, token: str) -> bool:
        """Return whether the token is the one that works, and replace it if so."""
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return False
        self.token = secrets.token_urlsafe(24)
        self._exchanged(self.token)
        return True

    def knows(self, cookie: str) -> bool:
        return hmac.compare_digest(cookie.encode(errors="replace"), self.cookie.encode())


def create_app(session: Session, access: Access, port: int) -> ASGIApp:
    """The application, to be served on 127.0.0.1 at this port."""
    app = FastAPI(title="Espalier", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    async def page(request: Request) -> Response:
        answer = Response((PAGE / "index.html").read_text("utf-8"), media_type="text/html")
        if request.scope.get(EXCHANGED):
            answer.set_cookie(cookie_name(port), access.cookie, httponly=True, samesite="strict", path="/")
        return answer

    @app.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in FILES:
            return _refusal(404, "there is no such file")
        return Response((PAGE / name).read_text("utf-8"), media_type=FILES[name])

    @app.get("/api/state")
    async def state() -> Response:
        return _json(await asyncio.to_thread(session.state))

    @app.get("/api/episode")
    async def episode(id: str, reveal: bool = False) -> Response:
        return _json(await asyncio.to_thread(session.episode, id, reveal))

    @app.post("/api/answer")
    async def answer(request: Request) -> Response:
        kept = await asyncio.to_thread(session.answer, await _body(request))
        return _json({"kept": kept.id})

    @app.post("/api/undo")
    async def undo(request: Request) -> Response:
        taken = await asyncio.to_thread(session.undo)
        return _json({"undone": None if taken is None else {"kind": taken.kind, "trajectory": taken.trajectory}})

    async def refuse(_: Request, error: Exception) -> Response:
        if isinstance(error, SpecError):
            return _refusal(400, "; ".join(str(problem) for problem in error.problems))
        return _refusal(503, f"{error}")

    for kind in (SpecError, ResourceError, WaitTimeout):
        app.add_exception_handler(kind, refuse)
    return Guarded(app, access, port)


def cookie_name(port: int) -> str:
    """Cookies know no ports: two servers of one machine need two names."""
    return f"espalier-{port}"


class Guarded:
    """Refuses what does not come from our own page in a browser that has the cookie or the token."""

    def __init__(self, app: ASGIApp, access: Access, port: int):
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
        refused = self._why_not(scope, headers)
        if refused is None:
            try:
                receive = await _small(receive) if scope["method"] not in ("GET", "HEAD") else receive
            except _TooLarge:
                refused = _refusal(413, f"at most {MOST_BYTES} bytes")
        await (refused or self.app)(scope, receive, with_headers)

    def _why_not(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        host = headers.get("host", "")
        if host not in self.hosts:
            return _refusal(421, f"this server is {self.hosts[0]}")
        if not self._known(scope, headers):
            why = "the token is missing, wrong or was used before: open the URL that the command has printed last"
            return _refusal(401, why)
        if scope["method"] in ("GET", "HEAD"):
            return None
        if headers.get("origin") != f"http://{host}":
            return _refusal(403, "only the page of this server may write")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _refusal(415, "expected application/json")
        if headers.get("content-length", "0").isdecimal() and int(headers.get("content-length", "0")) > MOST_BYTES:
            return _refusal(413, f"at most {MOST_BYTES} bytes")
        return None

    def _known(self, scope: Scope, headers: dict[str, str]) -> bool:
        """Return whether the request has the cookie, or a token to exchange for it: then it is exchanged."""
        with suppress(CookieError):
            cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
            if cookie is not None and self.access.knows(cookie.value):
                return True
        if scope["path"] != "/" or scope["method"] != "GET":
            return False
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        scope[EXCHANGED] = len(tokens) == 1 and self.access.exchange(tokens[0])
        return bool(scope[EXCHANGED])


class _TooLarge(Exception):
    pass


async def _small(receive: Receive) -> Receive:
    """The same body, read to its end, if it is small. Raises _TooLarge."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
        if len(body) > MOST_BYTES:
            raise _TooLarge
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _body(request: Request) -> dict[str, Any]:
    try:
        data = json.loads(await request.body())
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise SpecError([Problem("body", "expected a JSON object")])
    return data


def _json(data: Any) -> Response:
    return Response(json.dumps(data), media_type="application/json")  # ASCII: text of models may be no valid UTF-8


def _refusal(status: int, why: str) -> Response:
    return Response(json.dumps({"error": why}), status, media_type="application/json")
