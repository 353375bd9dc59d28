"""HTTP client of AgentGym servers.

Idempotent requests (the health check, /reset, /observation) are retried after transient failures: 429, 502, 503, 504,
or a broken connection. /create and /step are not idempotent: they are retried only if no connection was established.
Every request opens a new connection, so an idle connection that the server closed is never mistaken for a lost step.

Every failure is an EnvironmentFailed with the address, the request and the response. Responses are untrusted
(`components.bounded_reply`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from components.bounded_reply import InvalidReply, parse, request
from components.environments.adapters.agentgym_kinds import AgentGymKind
from components.errors import EnvironmentFailed, EnvironmentUnavailable, SpecError
from components.exceptions import PASSING
from components.retry import Backoff

if TYPE_CHECKING:
    import ssl

    import httpx

CLOSE_TIMEOUT = 5.0
"""Timeout for closing an instance, in seconds."""


class ServerGone(EnvironmentUnavailable):
    """Connection refused: the server is down or not yet started, and its instances are lost."""


class RequestRejected(EnvironmentFailed):
    """The server rejected the request, with an error in the body or with an error status."""

    error_text = ""
    """Error text of a response with status 200."""


class Overloaded(RequestRejected, EnvironmentUnavailable):
    """The server, or a proxy before it, returned a transient error status (429, 502, 503, 504)."""


class Instance:
    """An environment instance on a server."""

    __slots__ = ("failures", "generation", "id")

    def __init__(self, id: int, generation: int):
        self.id = id
        self.generation = generation
        self.failures = 0


@dataclass(frozen=True, slots=True)
class AgentGymServer:
    """The server of one kind: its address and timeouts."""

    kind: AgentGymKind
    url: str
    """Base URL, without the prefix of the kind."""
    timeout: float
    """Timeout of a request, in seconds."""
    patience: float
    """Maximum duration of retries after transient failures, in seconds."""

    async def ready(self) -> None:
        """Wait until the server responds. Raises EnvironmentFailed."""
        await self._ask("GET", self.url + "/", None, refused=True, passing=True)

    async def get(self, path: str, instance: Instance | None = None) -> Any:
        """Return the response of a read-only request."""
        query = f"?{self.kind.key}={instance.id}" if instance else ""
        address = f"{self._base}{path}{query}"
        return self._read("GET", address, None, *await self._ask("GET", address, None, passing=True))

    async def post(
        self, path: str, body: dict[str, Any] | None, *, passing: bool = False, refused: bool = False
    ) -> Any:
        """Return the response.

        passing: retry after transient failures; only for idempotent requests. refused: also retry while the connection
        is refused, for a server that is still starting.
        """
        address = self._base + path
        answer = await self._ask("POST", address, body, passing=passing, refused=refused)
        return self._read("POST", address, body, *answer)

    async def create(self) -> int:
        """Create an instance; return its number."""
        await self.ready()
        answer = await self.post("/create", self.kind.create, refused=True)
        number = answer
        if isinstance(answer, dict):
            number = next((answer[key] for key in ("id", "env_idx") if key in answer), None)
        if isinstance(number, bool) or not isinstance(number, int):
            self.fail(
                "POST",
                self._base + "/create",
                self.kind.create,
                f"returned {answer!r:.200}, which has no instance number",
            )
        return number

    async def has_instance(self, instance: Instance) -> bool:
        """Return False if the server is sure not to have this instance."""
        if self.kind.listed:
            ids = await self.get("/list_envs")
            return not isinstance(ids, list) or instance.id in ids
        if self.kind.key == "env_idx":  # servers with `id` report an unknown instance in their errors
            try:
                await self.get("/observation", instance)
            except RequestRejected:
                return False
        return True

    async def close(self, instance: Instance) -> bool | None:
        """Close an instance; return True if it was closed, None if the server does not support closing."""
        body = {self.kind.key: instance.id}
        try:
            status, content = await self._ask("POST", self._base + "/close", body, timeout=CLOSE_TIMEOUT)
        except EnvironmentFailed:
            return False
        if status in (404, 405):
            return None
        return status == 200 and b"error" not in content and content.strip() != b"false"

    def close_all(self, numbers: Sequence[int]) -> None:
        """Close instances if the server supports it, without an event loop."""
        import httpx

        deadline = time.monotonic() + CLOSE_TIMEOUT
        with contextlib.suppress(httpx.HTTPError), httpx.Client(trust_env=not _is_local(self.url)) as client:
            for number in numbers:
                body, left = {self.kind.key: number}, deadline - time.monotonic()
                if left <= 0:
                    return
                with client.stream("POST", f"{self._base}/close", json=body, timeout=left) as answer:  # no body read
                    if answer.status_code != 200:
                        return

    @property
    def _base(self) -> str:
        return self.url + self.kind.prefix

    def fail(
        self, method: str, address: str, body: Any, problem: str, error: type[EnvironmentFailed] = RequestRejected
    ) -> NoReturn:
        """Raise an error that names the request."""
        sent = f" {json.dumps(body):.300}" if body is not None else ""
        raise error(f"AgentGym server: {method} {address}{sent} {problem}")

    async def _ask(
        self,
        method: str,
        address: str,
        body: Any,
        *,
        refused: bool = False,
        passing: bool = False,
        timeout: float | None = None,
    ) -> tuple[int, bytes]:
        """Return the status and body of the response, whatever its status."""
        import httpx

        timeout = self.timeout if timeout is None else min(timeout, self.timeout)
        error: type[EnvironmentFailed]
        backoff = Backoff(self.patience)
        while True:
            try:
                packed = None if body is None else json.dumps(body).encode()
                kind = {"Content-Type": "application/json"} if body is not None else {}
                status, content = await request(
                    _client(self.url), method, address, seconds=timeout, content=packed, headers=kind
                )
            except (httpx.ConnectError, httpx.ConnectTimeout) as cause:  # the request was not sent
                problem, again, error = f"cannot be reached: {cause!r}", refused, EnvironmentUnavailable
                if _is_connection_refused(cause):
                    error = ServerGone
                elif isinstance(cause, httpx.ConnectTimeout):
                    again = True  # the server may be overloaded
            except httpx.TimeoutException:
                self.fail(method, address, body, f"timed out after {timeout:g} s", EnvironmentFailed)
            except InvalidReply as cause:
                self.fail(method, address, body, str(cause), EnvironmentFailed)
            except httpx.HTTPError as cause:
                problem, again, error = (
                    f"lost its connection: {type(cause).__name__}: {cause}",
                    passing,
                    EnvironmentUnavailable,
                )
            else:
                if status not in PASSING:
                    return status, content
                problem, again, error = f"returned status {status}: {content[:200]!r}", passing, Overloaded
            if not again:
                self.fail(method, address, body, problem, error)
            pause = backoff.pause()
            if pause is None:
                self.fail(method, address, body, f"{problem} (retried for {self.patience:g} s)", error)
            await asyncio.sleep(pause)

    def _read(self, method: str, address: str, body: Any, status: int, content: bytes) -> Any:
        if status != 200:
            self.fail(method, address, body, f"returned status {status}: {content[:200]!r}")
        try:
            answer = parse(content, surrogates=True)
        except InvalidReply as cause:
            self.fail(method, address, body, f"{cause!s:.120}: {content[:200]!r}", EnvironmentFailed)
        if isinstance(answer, dict) and "error" in answer:
            text = str(answer["error"])[:300]
            try:
                self.fail(method, address, body, f"returned the error {text!r}")
            except RequestRejected as error:
                error.error_text = text
                raise
        return answer


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, httpx.AsyncClient]] = (
    weakref.WeakKeyDictionary()
)


def server_address(url: str, prefix: str) -> str:
    """Return the URL of a server without the prefix of its kind. Raises SpecError."""
    invalid = SpecError.at("environment.url", f"{url!r:.200}: expected an address such as http://127.0.0.1:36001")
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise invalid from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise invalid
    if parts.username is not None or parts.password is not None:
        message = "contains a user name or a password, which would be stored; add them in a proxy before the server"
        raise SpecError.at("environment.url", message)
    return url.strip().rstrip("/").removesuffix(prefix or "/").rstrip("/")


def _is_connection_refused(error: BaseException | None) -> bool:
    """Return True if the error or one of its causes is a refused connection."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(map(_is_connection_refused, (*parts, error.__cause__, error.__context__)))


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


@functools.cache
def _certificates() -> ssl.SSLContext:
    import ssl

    return ssl.create_default_context()


def _client(url: str) -> httpx.AsyncClient:
    """Return the HTTP client of the running event loop.

    It keeps no connections alive, so it need not be closed. Proxies from environment variables apply to remote hosts
    only.
    """
    import httpx

    local, clients = _is_local(url), _clients.setdefault(asyncio.get_running_loop(), {})
    if local not in clients:
        clients[local] = httpx.AsyncClient(
            verify=_certificates(),
            trust_env=not local,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
    return clients[local]
