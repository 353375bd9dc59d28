"""Client of a JSON API over HTTP that may be temporarily unavailable: restarting, overloaded or disconnected.

A request that fails, is cut short or returns an invalid response is retried with exponential backoff, or after the
delay that the server asks for. After `retry_for` seconds it fails. A permanent error is raised at once: as
ResourceError if every other request would fail as well (rejected key, unknown model), or if the server is unreachable
at first contact (`components.retry`). `ChatClient` is that of OpenAI's chat completions, for engines, judges and
deployments behind a URL.

Replies are bounded (`components.bounded_reply`): bytes, values, total time, no compression.

Thousands of requests may be in flight: each costs a few tenths of a millisecond of this process. They run on an event
loop of the client's own thread, so several loops can use the client one after the other, and a blocked caller does not
delay responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import ssl
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import uvloop

from components.bounded_reply import CONNECT, IDENTITY, LIMITS, InvalidReply, ReplyLimits, bounded, read_body
from components.errors import BoundaryError, ContextOverflow, ResourceError
from components.json_reply import AGAIN, FailedAttempt, Reply, asked_to_wait, packed
from components.retry import Answer, ClientTimeouts, record_contact, retry_with_backoff

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

QUIET = 3.0
"""Seconds of failure before a warning on the console; shorter outages are only logged."""
JSON = "application/json"
LOOKUP = 4.0
"""Time limit of a host name lookup in seconds. The system's own limit may be half a minute."""
IDLE = 4.0
"""Seconds before an idle connection is closed. Most servers close after five."""


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

    def models(self, path: str) -> list[dict[str, Any]]:
        """Return the models and adapters that the server lists, each with its `id`."""

        def read(reply: Reply) -> list[dict[str, Any]]:
            try:
                return [{**model, "id": str(model["id"])} for model in reply.json()["data"]]
            except (KeyError, TypeError):
                raise self._error("its list of models is invalid") from None

        return self.now("GET", path, None, read)

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

        async def attempt() -> Answer:
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
            answer = await retry_with_backoff(attempt, self._patience, self.url, self._on_failure)
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


def _proxy(url: str) -> str | None:
    """Return the proxy that environment variables name for a URL; None for this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("localhost", "::1") or host.startswith("127.") or urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


NO_CREDIT_CODES = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
"""Error codes for which a retry is pointless: the account has no credit."""


class ChatClient(Client):
    """Client of one server with chat completions."""

    async def complete(
        self,
        body: dict[str, Any],
        read: Callable[[dict[str, Any]], Answer],
        refused: RefusalCheck = lambda *_: None,
        limits: ReplyLimits = LIMITS,
    ) -> Answer:
        """Send a request and return `read(completion)`, which may raise FailedAttempt for an invalid answer.

        refused: maps errors of this use, other than a prompt that is too long or no credit, to exceptions; None leaves
        the error to the client. Raises ContextOverflow for
        a prompt that the model does not take, ResourceError if the model does not exist or the account has no credit,
        and the exceptions of `Client.post`.
        """

        def refused_completion(reply: Reply, text: str) -> Exception | None:
            error = self._refused_prompt(reply, text) or refused(reply, text)
            return error or self._missing(reply, text, body["model"])

        return await self.post(
            "/chat/completions", body, lambda reply: read(reply.json()), refused_completion, limits=limits
        )

    def _refused_prompt(self, reply: Reply, text: str) -> Exception | None:
        code, message = reply.error()
        if code == "context_length_exceeded" or (reply.status == 400 and "maximum context length" in message):
            return ContextOverflow(text)
        if reply.status == 402 or code in NO_CREDIT_CODES:
            return ResourceError(f"the account at {self.url} has no credit left ({text})")
        return None

    def _missing(self, reply: Reply, text: str, model: str) -> Exception | None:
        if reply.status == 404:
            return ResourceError(f"{self.url} has no /chat/completions or no model {model} ({text})")
        return None


@contextmanager
def fail_on_invalid_answer() -> Iterator[None]:
    """Raise FailedAttempt for an answer that lacks a part or has a part of another type."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FailedAttempt(f"an invalid answer ({type(error).__name__}: {error})", empty=True) from None


def ignore_body(reply: Reply) -> None:
    """Read nothing of a reply whose status suffices."""


def empty_answer() -> FailedAttempt:
    """Return the failure of an answer without content, which is retried."""
    return FailedAttempt("an empty answer", empty=True)
