"""Requests to AgentGym's servers, and the instances that this process holds there.

Most of the servers cannot close an instance, so one that is made is there until the server ends: instances are pooled,
one pool for each server and process, and lent for an episode. A pool never holds more than its limit. A server that is
full and gives an instance away twice, as some do, lowers it; one that was restarted has forgotten its instances, and
so does the pool.

What is repeated: asking whether the server is there, /reset and /observation, after what passes (502, 503, 504, a
broken connection). Making an instance and a step change something: they are sent again only where nothing can have
been carried out, which is while no connection comes about. Every request has a connection of its own, so an idle one
that the server closed meanwhile is never mistaken for a step that was lost.

Whatever fails is an EnvironmentFailed that says the address, the request and the answer. Answers are not trusted:
their size is limited, they must be JSON, and NaN or infinity are none.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import logging
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from components.environments.adapters.agentgym_kinds import Kind
from components.errors import EnvironmentAway, EnvironmentFailed
from components.exceptions import PASSING

if TYPE_CHECKING:
    import ssl

    import httpx

logger = logging.getLogger(__name__)

QUEUE = 3600.0
"""Seconds that an episode may wait for an instance; a whole wave may be before it, and `timeout` of its stage ends it
earlier."""
MAX_ANSWER = 8 * 2**20
"""Bytes of an answer."""
CONNECT_TIMEOUT = 10.0
"""Seconds in which a connection must come about."""
FAILURES = 3
"""Failed episodes in a row after which an instance is not lent any more."""
MOST_LEFT = 8
"""Instances that are left on a server for that reason; it may be the items that fail."""
CLOSE_TIMEOUT = 5.0
"""Seconds that closing an instance may take."""


class ServerGone(EnvironmentAway):
    """Nobody listens at the server's address: it is down, or not up yet; its instances are lost."""


class Refused(EnvironmentFailed):
    """The server answered that it cannot: with an error, or with a status that says so."""

    said = ""
    """The error in an answer with status 200."""


class Overloaded(Refused, EnvironmentAway):
    """The server, or what stands before it, answered with a status that passes."""


class Instance:
    """One environment on a server."""

    __slots__ = ("failures", "generation", "id")

    def __init__(self, id: int, generation: int):
        self.id = id
        self.generation = generation
        self.failures = 0


@dataclass(frozen=True, slots=True)
class Server:
    """The address of one kind's server, and how long to wait for it."""

    kind: Kind
    url: str
    """Without the kind's prefix."""
    timeout: float
    """Seconds that a request may take."""
    patience: float
    """Seconds for which what passes is tried again."""

    async def ready(self) -> None:
        """Waits until the server answers at all. Raises EnvironmentFailed."""
        await self._ask("GET", self.url + "/", None, refused=True, passing=True)

    async def get(self, path: str, instance: Instance | None = None) -> Any:
        """The answer to what changes nothing."""
        query = f"?{self.kind.key}={instance.id}" if instance else ""
        address = f"{self._base}{path}{query}"
        return self._read("GET", address, None, *await self._ask("GET", address, None, passing=True))

    async def post(
        self, path: str, body: dict[str, Any] | None, *, passing: bool = False, refused: bool = False
    ) -> Any:
        """The answer. passing: try again after what passes, as it does no harm to do it twice. refused: also wait for
        a server that is not up yet."""
        address = self._base + path
        answer = await self._ask("POST", address, body, passing=passing, refused=refused)
        return self._read("POST", address, body, *answer)

    async def create(self) -> int:
        """A new instance's number."""
        await self.ready()
        answer = await self.post("/create", self.kind.create, refused=True)
        found = answer
        if isinstance(answer, dict):
            found = next((answer[key] for key in ("id", "env_idx") if key in answer), None)
        if isinstance(found, bool) or not isinstance(found, int):
            self.fail(
                "POST", self._base + "/create", self.kind.create, f"answered {answer!r:.200}, which has no number"
            )
        return found

    async def knows(self, instance: Instance) -> bool:
        """Whether the server has this instance, as far as it can be asked."""
        if self.kind.listed:
            found = await self.get("/list_envs")
            return not isinstance(found, list) or instance.id in found
        if self.kind.key == "env_idx":  # those with id say so in their errors
            try:
                await self.get("/observation", instance)
            except Refused:
                return False
        return True

    async def close(self, instance: Instance) -> bool | None:
        """Whether an instance was closed; None where the server cannot close any."""
        body = {self.kind.key: instance.id}
        try:
            status, content = await self._ask("POST", self._base + "/close", body, timeout=CLOSE_TIMEOUT)
        except EnvironmentFailed:
            return False
        if status in (404, 405):
            return None
        return status == 200 and b"error" not in content and content.strip() != b"false"

    @property
    def _base(self) -> str:
        return self.url + self.kind.prefix

    def fail(
        self, method: str, address: str, body: Any, what: str, error: type[EnvironmentFailed] = Refused
    ) -> NoReturn:
        sent = f" {json.dumps(body):.300}" if body is not None else ""
        raise error(f"AgentGym server: {method} {address}{sent} {what}")

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
        """Status and content of the answer, with which status ever it came."""
        import httpx

        timeout = self.timeout if timeout is None else min(timeout, self.timeout)
        error: type[EnvironmentFailed]
        until, pause = time.monotonic() + self.patience, 0.1
        while True:
            try:
                status, content = await self._send(method, address, body, timeout)
            except (httpx.ConnectError, httpx.ConnectTimeout) as cause:  # nothing was sent
                what, again, error = f"cannot be reached: {cause!r}", refused, EnvironmentAway
                if _is_refusal(cause):
                    error = ServerGone
                elif isinstance(cause, httpx.ConnectTimeout):
                    again = True  # it may be there, and only busy
            except (httpx.TimeoutException, TimeoutError):
                self.fail(method, address, body, f"was not answered within {timeout:g} s", EnvironmentFailed)
            except _TooLong:
                self.fail(method, address, body, f"was answered with more than {MAX_ANSWER} bytes", EnvironmentFailed)
            except httpx.HTTPError as cause:
                what, again, error = f"broke off: {type(cause).__name__}: {cause}", passing, EnvironmentAway
            else:
                if status not in PASSING:
                    return status, content
                what, again, error = f"was answered with {status}: {content[:200]!r}", passing, Overloaded
            if not again:
                self.fail(method, address, body, what, error)
            if time.monotonic() + pause > until:
                self.fail(method, address, body, f"{what} (tried for {self.patience:g} s)", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _send(self, method: str, address: str, body: Any, timeout: float) -> tuple[int, bytes]:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        found = bytearray()
        async with asyncio.timeout(timeout):
            async with _client(self.url).stream(method, address, content=content, headers=headers) as response:
                async for chunk in response.aiter_bytes():
                    found += chunk
                    if len(found) > MAX_ANSWER:
                        raise _TooLong
        return response.status_code, bytes(found)

    def _read(self, method: str, address: str, body: Any, status: int, content: bytes) -> Any:
        if status != 200:
            self.fail(method, address, body, f"was answered with {status}: {content[:200]!r}")
        try:
            answer = json.loads(content.decode("utf-8"), parse_constant=_no_number)
        except (ValueError, RecursionError) as cause:
            what = f"was answered with what is no JSON ({cause!s:.100}): {content[:200]!r}"
            self.fail(method, address, body, what.replace("\n", " "), EnvironmentFailed)
        if isinstance(answer, dict) and "error" in answer:
            said = str(answer["error"])[:300]
            try:
                self.fail(method, address, body, f"was answered with the error {said!r}")
            except Refused as error:
                error.said = said
                raise
        return answer


class Pool:
    """The instances that this process holds on one server."""

    def __init__(self) -> None:
        self.held: dict[int, Instance] = {}
        """Those that are there, by number."""
        self._free: list[Instance] = []
        self._waiting: deque[object] = deque()
        self._making = 0
        self._most: int | None = None
        self._left = 0
        self._generation = 0
        self._closes = True
        self._lock = threading.Lock()

    async def lend(self, server: Server, limit: int) -> Instance:
        """An instance for one episode: a free one, or a new one, or the first that comes back. Who waits longest is
        next."""
        until, ticket = time.monotonic() + QUEUE, object()
        with self._lock:
            self._waiting.append(ticket)
        try:
            while True:
                make = False
                with self._lock:
                    most = limit if self._most is None else min(limit, self._most)
                    if self._waiting[0] is ticket:
                        if self._free:
                            return self._free.pop()
                        if make := len(self.held) + self._making < most:
                            self._making += 1
                            self._waiting.popleft()  # others need not wait while it is made
                if make:
                    making = asyncio.create_task(self._make(server))
                    try:
                        instance = await asyncio.shield(making)
                    except asyncio.CancelledError:
                        making.add_done_callback(self._adopt)  # the server makes it all the same
                        raise
                    if instance is not None:
                        return instance
                    with self._lock:
                        self._waiting.appendleft(ticket)
                elif time.monotonic() > until:
                    raise EnvironmentFailed(
                        f"AgentGym server: {server.url}: waited {QUEUE:g} s for one of {most} instances, all in use; "
                        "play fewer episodes at once (concurrency) or allow more (environment.instances)"
                    )
                else:
                    await asyncio.sleep(0.02)
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(ticket)

    async def _make(self, server: Server) -> Instance | None:
        """A new instance; None where the server gave one that is held already."""
        generation = self._generation
        try:
            number = await server.create()
        finally:
            with self._lock:
                self._making -= 1
        with self._lock:
            if generation != self._generation:
                return None
            if number in self.held:
                self._most = len(self.held)
                logger.warning(
                    "the AgentGym server at %s is full: it gave instance %d a second time; %d at once from now on",
                    server.url,
                    number,
                    self._most,
                )
                return None
            instance = self.held[number] = Instance(number, generation)
        return instance

    def _adopt(self, making: asyncio.Task[Instance | None]) -> None:
        """Takes an instance that nobody waits for any more."""
        if not making.cancelled() and making.exception() is None and (instance := making.result()) is not None:
            self.give_back(instance)

    def has(self, instance: Instance) -> bool:
        """Whether an instance is there still, as far as is known."""
        return instance.generation == self._generation

    def give_back(self, instance: Instance) -> None:
        """After an episode."""
        with self._lock:
            if instance.generation == self._generation:
                instance.failures = 0
                self._free.append(instance)

    async def give_back_broken(self, server: Server, instance: Instance) -> None:
        """After an episode that failed: it is closed; where the server cannot, it is lent again as the last one, unless
        it has failed several times."""
        if instance.generation != self._generation:
            return
        if self._closes:
            closed = await server.close(instance)
            self._closes = closed is not None
            if closed:
                self.forget(instance)
                return
        with self._lock:
            if instance.generation != self._generation:
                return
            instance.failures += 1
            if instance.failures < FAILURES or self._left >= MOST_LEFT:
                self._free.insert(0, instance)
                return
            self._left += 1
        logger.warning(
            "instance %d of the AgentGym server at %s failed %d times in a row and is left there",
            instance.id,
            server.url,
            FAILURES,
        )
        self.forget(instance)

    def forget(self, instance: Instance) -> None:
        """It is not there any more."""
        with self._lock:
            if instance.generation == self._generation:
                self.held.pop(instance.id, None)
                self._most = None

    def lost(self, instance: Instance) -> None:
        """The server that had this instance was restarted, or is down: it has none of them any more."""
        with self._lock:
            if instance.generation == self._generation:
                self._generation += 1
                self.held, self._free, self._most = {}, [], None

    def leave(self, server: Server) -> None:
        """Closes what is held, where the server can."""
        import httpx

        with self._lock:
            numbers, self.held, self._free = list(self.held), {}, []
            self._generation += 1
        with contextlib.suppress(httpx.HTTPError), httpx.Client(trust_env=not _is_local(server.url)) as client:
            for number in numbers:
                address = f"{server.url}{server.kind.prefix}/close"
                answer = client.post(address, json={server.kind.key: number}, timeout=CLOSE_TIMEOUT)
                if answer.status_code != 200:
                    return


_pools: dict[tuple[int, str], tuple[Pool, Server]] = {}
_lock = threading.Lock()
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, httpx.AsyncClient]] = (
    weakref.WeakKeyDictionary()
)


def pool_of(server: Server) -> Pool:
    """The pool that all environments of this process share on a server."""
    with _lock:
        place = (os.getpid(), server.url + server.kind.prefix)  # what a forked process inherits is not its own
        if place not in _pools:
            _pools[place] = (Pool(), server)
        return _pools[place][0]


@atexit.register
def leave_all() -> None:
    """Closes what this process holds, on servers that can."""
    for (pid, _), (pool, server) in list(_pools.items()):
        if pid == os.getpid() and pool.held:
            pool.leave(server)


class _TooLong(Exception):
    """An answer is longer than MAX_ANSWER."""


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _is_refusal(error: BaseException | None) -> bool:
    """Whether nobody listens: somewhere among the causes."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(map(_is_refusal, (*parts, error.__cause__, error.__context__)))


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


@functools.cache
def _certificates() -> ssl.SSLContext:
    import ssl

    return ssl.create_default_context()


def _client(url: str) -> httpx.AsyncClient:
    """That of the running loop. It keeps no connections, so none has to be closed with it. Proxies of the environment
    hold for other machines only."""
    import httpx

    local, clients = _is_local(url), _clients.setdefault(asyncio.get_running_loop(), {})
    if local not in clients:
        clients[local] = httpx.AsyncClient(
            verify=_certificates(),
            trust_env=not local,
            headers={"Accept-Encoding": "identity"},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
    return clients[local]
