"""Client of a JSON API over HTTP that may be temporarily unavailable: restarting, overloaded or disconnected.

A request that fails, is cut short or returns an invalid response is retried with exponential backoff, or after the
delay that the server asks for. After `retry_for` seconds it fails. A permanent error is raised at once: as
ResourceError if every other request would fail as well (rejected key, unknown model). So is a refused connection or an
unknown host at a server that has not answered this process yet, which is more likely a wrong address than an outage;
`wait_for` waits for a server that is still starting.

Replies are bounded (`components.bounded_reply`): bytes, values, total time, no compression.

Thousands of requests may be in flight: each costs a few tenths of a millisecond of this process. They run on an event
loop of the client's own thread, so several loops can use the client one after the other, and a blocked caller does not
delay responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import ssl
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

import orjson
import uvloop

from components.bounded_reply import IDENTITY, LIMITS, InvalidReply, ReplyLimits, bounded, read_body
from components.errors import BoundaryError, ResourceError
from components.retry import Backoff
from components.strict_json import check_structure

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

QUIET = 3.0
"""Seconds of failure before a warning on the console; shorter outages are only logged."""
EMPTY_ANSWERS = 3
"""Retries of an empty or invalid response. The server is up, so waiting longer does not help."""
AGAIN = {408, 409, 425, 429, *range(500, 600)}
"""HTTP statuses that are retried."""
JSON = "application/json"
MAX_QUOTED = 300
"""Characters of a server's message that are quoted."""
CONNECT = 10.0
"""Connection timeout in seconds."""
LOOKUP = 4.0
"""Time limit of a host name lookup in seconds. The system's own limit may be half a minute."""
IDLE = 4.0
"""Seconds before an idle connection is closed. Most servers close after five."""

Answer = TypeVar("Answer")


class FailedAttempt(Exception):
    """Failed attempt that may succeed when retried."""

    def __init__(self, message: str, *, pause: float | None = None, empty: bool = False, unreachable: bool = False):
        super().__init__(message)
        self.pause = pause
        """Seconds that the server asks to wait; None without a request."""
        self.empty = empty
        self.unreachable = unreachable
        """True if no connection was established: refused, or an unknown host."""


class Reply(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes
    limits: ReplyLimits = LIMITS

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> dict[str, Any]:
        """Return the JSON object of the response. Raise FailedAttempt if it is not a JSON object."""
        try:
            if len(self.content) > 2 * self.limits.values:  # fewer bytes cannot have more values
                check_structure(self.content, self.limits.values)
            body = orjson.loads(self.content)
        except orjson.JSONDecodeError:
            raise FailedAttempt(f"the response is not JSON: {self.text[:MAX_QUOTED]!r}", empty=True) from None
        except ValueError as error:
            raise FailedAttempt(f"the response is not used: {error}", empty=True) from None
        if not isinstance(body, dict):
            raise FailedAttempt(f"the response is not a JSON object: {self.text[:MAX_QUOTED]!r}", empty=True)
        return body

    def error(self) -> tuple[str, str]:
        """Return code and message of OpenAI's error object; without one, an empty code and the response text."""
        try:
            error = orjson.loads(self.content)["error"]
            return str(error.get("code") or ""), str(error.get("message") or "")[:MAX_QUOTED]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "", self.text[:MAX_QUOTED] or self.reason


class StreamedBody(Protocol):
    """Reader of a response with status 200 while it arrives."""

    @property
    def begun(self) -> bool:
        """True if a part was passed on, after which a failed request is not retried."""
        ...

    async def consume(self, chunks: AsyncIterator[bytes]) -> tuple[int, bytes]:
        """Read one response and return its status and content: those of an error that the stream ends with, or 200. May
        raise FailedAttempt."""
        ...


@dataclass(frozen=True)
class ClientTimeouts:
    """Timeouts of a client, and their key path."""

    timeout: float
    """Seconds for one response."""
    retry_for: float
    """Seconds for which a failed request is retried."""
    path: str
    """Key path of the section that holds these values, for messages."""
    wait_for: float | None = None
    """Seconds to wait for a server that has not answered yet; None: 0, and the section has no such key."""


_reached: set[str] = set()
"""Servers that have answered this process, in any stage."""


def record_contact(server: str) -> None:
    """Record that a server has answered: from now on it is retried when it is unreachable."""
    _reached.add(server)


async def patiently(
    once: Callable[[], Awaitable[Answer]],
    patience: ClientTimeouts,
    server: str,
    on_retry: Callable[[FailedAttempt], object] = lambda error: None,
) -> Answer:
    """Return the result of `once`, which is retried while it raises FailedAttempt.

    server: name for `record_contact`, and for messages. `on_retry` is called with each failure that is followed by a
    retry. Raises the last one, with the number of attempts or the seconds of retrying, and ResourceError for a server
    that is unreachable and has never answered."""
    backoff, first_contact = Backoff(patience.retry_for), Backoff(patience.wait_for or 0.0)
    empty = 0
    while True:
        try:
            return await once()
        except FailedAttempt as error:
            unknown = error.unreachable and server not in _reached
            pause = (first_contact if unknown else backoff).pause(error.pause)
            if unknown and pause is None:
                raise ResourceError(_no_contact(server, error, patience)) from None
            empty = empty + 1 if error.empty else 0
            if empty >= EMPTY_ANSWERS:
                raise FailedAttempt(f"{error}, {empty} times in a row") from None
            if pause is None:
                raise FailedAttempt(
                    f"{error}; retried for {patience.retry_for:g} s ({patience.path}.retry_for)"
                ) from None
            on_retry(error)
        await asyncio.sleep(pause)


def _no_contact(server: str, error: FailedAttempt, patience: ClientTimeouts) -> str:
    waited = f" for {patience.wait_for:g} s" if patience.wait_for else ""
    wait = "" if patience.wait_for is None else f", or let the run wait for it with {patience.path}.wait_for=SECONDS"
    return f"{patience.path}: {server} is unreachable{waited}: {error}. Start the server, correct its address{wait}"


RefusalCheck = Callable[[Reply, str], Exception | None]
"""Maps a response with a status other than 200, and its printable text, to an exception. None: the client decides."""


class Client:
    """HTTP client of one server.

    Args:
        url: Prefix of all paths.
        key: Bearer token; empty sends none.
        key_hint: How to set the key; part of the message about a rejected key.
        error: Raised when a request has failed for good.
        at_once: Limit on concurrent requests; further ones wait. None: no limit.
    """

    def __init__(
        self,
        url: str,
        key: str,
        patience: ClientTimeouts,
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
        self._failing_since: float | None = None
        self._warned = False
        self._proxy = _proxy(url)
        self._session: aiohttp.ClientSession | None = None
        self._turns = asyncio.Semaphore(at_once) if at_once else None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"client of {url}", daemon=True)
        self._thread.start()

    async def post(
        self,
        path: str,
        body: Any,
        read: Callable[[Reply], Answer],
        refused: RefusalCheck = lambda *_: None,
        stream: StreamedBody | None = None,
        limits: ReplyLimits = LIMITS,
    ) -> Answer:
        """Send `body` as JSON and return `read(reply)`. `read` may raise FailedAttempt for an invalid response. stream:
        reader of the response, in the client's thread; `read` receives what it returns. Raises the client's error,
        ResourceError, and the exceptions of `read` and `refused`."""
        work = self._ask("POST", path, packed(body), read, refused, stream=stream, limits=limits)
        return await asyncio.wrap_future(self._start(work))

    async def send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        read: Callable[[Reply], Answer],
        refused: RefusalCheck = lambda *_: None,
        kind: str = JSON,
        limits: ReplyLimits = LIMITS,
    ) -> Answer:
        """Send a request with any method and content, as `post` does. kind: content type."""
        work = self._ask(method, path, content, read, refused, kind, limits=limits)
        return await asyncio.wrap_future(self._start(work))

    def now(
        self,
        method: str,
        path: str,
        body: Any,
        read: Callable[[Reply], Answer],
        refused: RefusalCheck = lambda *_: None,
    ) -> Answer:
        """Send a request and block the calling thread. body: None sends none."""
        content = None if body is None else packed(body)
        return self._start(self._ask(method, path, content, read, refused)).result()

    def close(self) -> None:
        if not self._loop.is_closed():
            if self._session is not None:
                self._start(self._session.close()).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def printable(self, value: object) -> str:
        """Return a text with the key masked, in case the server repeats it."""
        text = str(value)
        return text.replace(self._key, "***") if self._key else text

    def _start(self, work: Coroutine[Any, Any, Answer]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _ask(
        self,
        method: str,
        path: str,
        content: bytes | None,
        read: Callable[[Reply], Answer],
        refused: RefusalCheck,
        kind: str = JSON,
        stream: StreamedBody | None = None,
        limits: ReplyLimits = LIMITS,
    ) -> Answer:
        """Send a request and retry it until it succeeds or has failed for good."""

        async def once() -> Answer:
            try:
                reply = await self._reply(method, path, content, kind, stream, limits)
                if reply.status != 200:
                    text = self.printable(f"HTTP {reply.status}: {reply.error()[1]}")
                    raise refused(reply, text) or self._error_for_status(reply, text, path)
                return read(reply)
            except FailedAttempt as error:
                if stream is None or not stream.begun:
                    raise
                raise self._error(self.printable(f"{self.url}: the response broke off: {error}")) from None

        try:
            answer = await patiently(once, self._patience, self.url, self._on_failure)
        except FailedAttempt as error:
            raise self._error(self.printable(f"{self.url}: {error}")) from None
        self._on_success()
        return answer

    async def _reply(
        self,
        method: str,
        path: str,
        content: bytes | None,
        kind: str,
        stream: StreamedBody | None,
        limits: ReplyLimits,
    ) -> Reply:
        """Return the response to one attempt. Raises FailedAttempt if there is none in time."""
        import aiohttp

        if self._session is None:
            self._session = self._open_session()
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
                    record_contact(self.url)
                    status = response.status
                    chunks = response.content.iter_any()
                    if stream is None or status != 200:
                        received = await read_body(response.headers, chunks, limits)
                    else:
                        status, received = await stream.consume(bounded(response.headers, chunks, limits))
                    return Reply(status, response.reason or "", response.headers, received, limits)
            except InvalidReply as error:
                raise FailedAttempt(f"the server {error}", empty=True) from None
            except TimeoutError:
                limit = f"{self._patience.timeout:g} s ({self._patience.path}.timeout)"
                raise FailedAttempt(f"no answer within {limit}") from None
            except aiohttp.ClientSSLError as error:
                raise FailedAttempt(f"the connection broke: {error}") from None
            except aiohttp.ClientConnectorError as error:
                raise FailedAttempt(f"no connection: {error}", unreachable=True) from None
            except (aiohttp.ClientError, OSError) as error:
                raise FailedAttempt(f"the connection broke: {str(error) or type(error).__name__}") from None

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        verified: ssl.SSLContext | bool = True
        if self.url.startswith("https:"):
            import httpx

            verified = httpx.create_ssl_context()  # brings certificates if the system has none
        headers = {"User-Agent": "espalier", **IDENTITY}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # callers limit their own concurrency
                keepalive_timeout=IDLE,
                ssl=verified,
                resolver=_resolver(),
            ),
            headers=headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT, self._patience.timeout)),
        )

    def _error_for_status(self, reply: Reply, text: str, path: str) -> Exception:
        """Return the exception for a status other than 200."""
        if reply.status in (401, 403):
            return ResourceError(f"{self.url} refuses the key ({text}); {self._key_hint}")
        if reply.status == 404:
            return ResourceError(f"{self.url} has no {path}, or not the requested resource ({text})")
        if reply.status in AGAIN and reply.headers.get("x-should-retry") != "false":
            return FailedAttempt(text, pause=asked_to_wait(reply.headers))
        return self._error(text)

    def _on_failure(self, error: FailedAttempt) -> None:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        message = self.printable(error)
        if self._warned or time.monotonic() < self._failing_since + QUIET:
            logger.info("%s: %s", self.url, message)
            return
        self._warned = True
        logger.warning("%s: %s; retrying for up to %g s", self.url, message, self._patience.retry_for)

    def _on_success(self) -> None:
        if self._failing_since is not None and self._warned:
            logger.warning("%s answers again, after %.1f s", self.url, time.monotonic() - self._failing_since)
        self._failing_since, self._warned = None, False


def _resolver() -> Any:
    """Return aiohttp's resolver with a time limit."""
    import aiohttp

    class BoundedResolver(aiohttp.ThreadedResolver):
        async def resolve(self, *args: Any, **options: Any) -> Any:
            try:
                async with asyncio.timeout(LOOKUP):
                    return await super().resolve(*args, **options)
            except TimeoutError:
                raise OSError(errno.ETIMEDOUT, f"the host name was not resolved within {LOOKUP:g} s") from None

    return BoundedResolver()


def packed(body: Any) -> bytes:
    """Return a value as JSON bytes."""
    try:
        return orjson.dumps(body)
    except TypeError:  # orjson rejects lone surrogates and integers of more than 64 bits
        return json.dumps(body).encode()


def asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait; None without a valid number in the headers."""
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(headers[name]) / unit
        except (KeyError, ValueError):
            continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    return None


def _proxy(url: str) -> str | None:
    """Return the proxy that environment variables name for a URL; None for this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("localhost", "::1") or host.startswith("127.") or urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")
