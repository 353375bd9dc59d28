"""A JSON API behind a URL that may fail for a while: it restarts, it is overloaded, the line breaks.

A request that was not answered, cut short or answered with something that is no answer is sent again, after a pause
that grows, or as long as the server says; when that has gone on for too long, the request has failed. What asking again
cannot mend is raised at once: as ResourceError where every other request would fail as well (a key that is refused, a
model that is not there).

Thousands of requests may be under way at once: a request costs a few tenths of a millisecond of this process. They run
on a loop of the client's own, so that it can be used from several loops, one after the other, and whoever holds one of
them up does not hold up answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
import ssl
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson
import uvloop

from components.errors import BoundaryError, ResourceError

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds before a request is sent again: the first time, and at most. A server that says how long is believed, and
those that it sent away together come back within a quarter more of that."""
QUIET = 3.0
"""Seconds of failing after which it is said on the console; what is over sooner is only in the log."""
EMPTY_ANSWERS = 3
"""Times that a request may be answered with nothing, or with something that is no answer: the server is there, so
that waiting does not help."""
AGAIN = {408, 409, 425, 429, *range(500, 600)}
"""Statuses that may be better the next time."""
JSON = "application/json"
SHOWN = 300
"""Characters of a server's own words in a message."""
CONNECT = 10.0
"""Seconds in which a connection must come about."""
IDLE = 4.0
"""Seconds after which an unused connection is closed: before servers do, of which most wait five."""

Answer = TypeVar("Answer")


class Failed(Exception):
    """A try that may go better the next time."""

    def __init__(self, message: str, *, pause: float | None = None, empty: bool = False):
        super().__init__(message)
        self.pause = pause
        """Seconds that the server asks to wait."""
        self.empty = empty


class Reply(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> dict[str, Any]:
        """Raises Failed where it is no JSON object."""
        try:
            body = orjson.loads(self.content)
        except ValueError:
            raise Failed(f"an answer that is no JSON: {self.text[:SHOWN]!r}", empty=True) from None
        if not isinstance(body, dict):
            raise Failed(f"an answer that is no JSON object: {self.text[:SHOWN]!r}", empty=True)
        return body

    def error(self) -> tuple[str, str]:
        """Code and message of OpenAI's error object; the text itself where there is none."""
        try:
            error = orjson.loads(self.content)["error"]
            return str(error.get("code") or ""), str(error.get("message") or "")[:SHOWN]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "", self.text[:SHOWN] or self.reason


@dataclass(frozen=True)
class Patience:
    """How long is waited, and what says so."""

    timeout: float
    """Seconds that one answer may take."""
    retry_for: float
    """Seconds for which a request that failed is sent again."""
    path: str
    """Where both stand in a configuration."""


async def patiently(
    once: Callable[[], Awaitable[Answer]], patience: Patience, away: Callable[[Failed], object] = lambda error: None
) -> Answer:
    """What one of several tries gives. A try raises Failed where the next may go better; `away` is told of each that
    is followed by another. Raises the last one, which says how often or how long it was tried."""
    deadline = None
    pause = FIRST_PAUSE
    empty = 0
    while True:
        try:
            return await once()
        except Failed as error:
            now = time.monotonic()
            deadline = deadline or now + patience.retry_for
            wait = random.uniform(0.5, 1.0) * pause if error.pause is None else random.uniform(1.0, 1.25) * error.pause
            empty = empty + 1 if error.empty else 0
            if empty >= EMPTY_ANSWERS:
                raise Failed(f"{error}, {empty} times in a row") from None
            if now + wait > deadline:
                raise Failed(f"{error}; sent again for {patience.retry_for:g} s ({patience.path}.retry_for)") from None
            away(error)
        await asyncio.sleep(wait)
        pause = min(2 * pause, LONGEST_PAUSE)


Refused = Callable[[Reply, str], Exception | None]
"""What a status other than 200 means; None leaves it to the client. Given the reply, and what may be printed of it."""


class Client:
    """Asks one server.

    Args:
        url: What paths are put behind.
        key: Sent as a bearer's token; empty sends none.
        key_hint: How to set the key, for who has sent a wrong one.
        error: Raised where a request has failed for good.
        at_once: Most requests under way; further ones wait. None is no limit.
    """

    def __init__(
        self,
        url: str,
        key: str,
        patience: Patience,
        *,
        key_hint: str,
        error: type[BoundaryError],
        at_once: int | None = None,
    ):
        self.url = url
        self._key = key
        self._patience = patience
        self._key_hint = key_hint
        self._error = error
        self._away_since: float | None = None
        self._told = False
        self._proxy = _proxy(url)
        self._session: aiohttp.ClientSession | None = None
        self._turns = asyncio.Semaphore(at_once) if at_once else None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"client of {url}", daemon=True)
        self._thread.start()

    async def post(
        self, path: str, body: Any, read: Callable[[Reply], Answer], refused: Refused = lambda *_: None
    ) -> Answer:
        """What `read` makes of the answer. It may raise Failed, for an answer that is none. body: JSON data. Raises the
        client's error, ResourceError, and what `read` and `refused` give."""
        return await self.send("POST", path, packed(body), read, refused)

    async def send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        read: Callable[[Reply], Answer],
        refused: Refused = lambda *_: None,
        kind: str = JSON,
    ) -> Answer:
        """As `post`, of anything. kind: of the content."""
        return await asyncio.wrap_future(self._start(self._ask(method, path, content, read, refused, kind)))

    def now(
        self, method: str, path: str, body: Any, read: Callable[[Reply], Answer], refused: Refused = lambda *_: None
    ) -> Answer:
        """As `post`, from a thread that may wait. body: None sends none."""
        content = None if body is None else packed(body)
        return self._start(self._ask(method, path, content, read, refused)).result()

    def close(self) -> None:
        if not self._loop.is_closed():
            if self._session is not None:
                self._start(self._session.close()).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def printable(self, said: object) -> str:
        """Without the key, should the server repeat it."""
        text = str(said)
        return text.replace(self._key, "***") if self._key else text

    def _start(self, work: Coroutine[Any, Any, Answer]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _ask(
        self,
        method: str,
        path: str,
        content: bytes | None,
        read: Callable[[Reply], Answer],
        refused: Refused,
        kind: str = JSON,
    ) -> Answer:
        """Sends a request until it is answered, or has failed for good."""

        def once() -> Awaitable[Answer]:
            return self._try(method, path, content, read, refused, kind)

        try:
            answer = await patiently(once, self._patience, self._is_away)
        except Failed as error:
            raise self._error(self.printable(error)) from None
        self._is_back()
        return answer

    async def _try(
        self,
        method: str,
        path: str,
        content: bytes | None,
        read: Callable[[Reply], Answer],
        refused: Refused,
        kind: str,
    ) -> Answer:
        if self._session is None:
            self._session = self._connected()
        async with self._turns or contextlib.nullcontext():
            try:
                async with (
                    asyncio.timeout(self._patience.timeout),
                    self._session.request(
                        method,
                        self.url + path,
                        data=content,
                        headers={"Content-Type": kind},
                        allow_redirects=False,
                        proxy=self._proxy,
                    ) as response,
                ):
                    reply = Reply(response.status, response.reason or "", response.headers, await response.read())
            except TimeoutError:
                limit = f"{self._patience.timeout:g} s ({self._patience.path}.timeout)"
                raise Failed(f"no answer within {limit}") from None
            except (aiohttp.ClientError, OSError) as error:
                raise Failed(f"the connection broke: {str(error) or type(error).__name__}") from None
        if reply.status != 200:
            text = self.printable(f"HTTP {reply.status}: {reply.error()[1]}")
            raise refused(reply, text) or self._refused(reply, text, path)
        return read(reply)

    def _connected(self) -> aiohttp.ClientSession:
        verified: ssl.SSLContext | bool = True
        if self.url.startswith("https:"):
            import httpx

            verified = httpx.create_ssl_context()  # with certificates of its own where the system has none
        headers = {"User-Agent": "espalier"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # whoever asks says how many at once
                keepalive_timeout=IDLE,
                ssl=verified,
            ),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT, self._patience.timeout)),
        )

    def _refused(self, reply: Reply, text: str, path: str) -> Exception:
        """What a status other than 200 means."""
        if reply.status in (401, 403):
            return ResourceError(f"{self.url} refuses the key ({text}); {self._key_hint}")
        if reply.status == 404:
            return ResourceError(f"{self.url} has no {path}, or not what it is asked for ({text})")
        if reply.status in AGAIN and reply.headers.get("x-should-retry") != "false":
            return Failed(text, pause=asked_to_wait(reply.headers))
        return self._error(text)

    def _is_away(self, error: Failed) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
        said = self.printable(error)
        if self._told or time.monotonic() < self._away_since + QUIET:
            logger.info("%s: %s", self.url, said)
            return
        self._told = True
        logger.warning("%s: %s; asking again for up to %g s", self.url, said, self._patience.retry_for)

    def _is_back(self) -> None:
        if self._away_since is not None and self._told:
            logger.warning("%s answers again, after %.1f s", self.url, time.monotonic() - self._away_since)
        self._away_since, self._told = None, False


def packed(body: Any) -> bytes:
    """As JSON."""
    try:
        return orjson.dumps(body)
    except TypeError:  # what orjson does not write: halves of surrogate pairs, numbers of more than 64 bits
        return json.dumps(body).encode()


def asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait; None where it does not say, or not in a number."""
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            found = float(headers[name]) / unit
        except (KeyError, ValueError):
            continue
        if math.isfinite(found):
            return max(found, 0.0)
    return None


def _proxy(url: str) -> str | None:
    """The proxy that the environment's variables name for a URL; none for this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("localhost", "::1") or host.startswith("127.") or urllib.request.proxy_bypass(host):
        return None
    known = urllib.request.getproxies()
    return known.get(parts.scheme) or known.get("all")
