"""Instances of environments that this process owns on AgentGym servers.

Most servers cannot close an instance, so it lives until the server ends. Instances are therefore pooled, one pool per
server and process, and an episode acquires one. A pool never exceeds its limit. Some servers return an instance that is
in use when they are full: this lowers the limit. After a restart of the server, the pool drops its instances.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque

from components.environments.adapters.agentgym_server import AgentGymServer, Instance
from components.errors import EnvironmentFailed

logger = logging.getLogger(__name__)

QUEUE = 3600.0
"""Maximum time that an episode waits for an instance, in seconds. Many episodes may precede it in the queue; `timeout`
of the stage may end it earlier."""
FAILURES = 3
"""Consecutive failed episodes after which an instance is retired."""
MAX_RETIRED = 8
"""Maximum number of retired instances per server; beyond it, the items are the likely cause of the failures."""


class InstancePool:
    """The instances that this process owns on one server."""

    def __init__(self) -> None:
        self.instances: dict[int, Instance] = {}
        """All instances of the current generation, by number."""
        self._free: list[Instance] = []
        self._waiting: deque[object] = deque()
        self._creating = 0
        self._capacity: int | None = None
        self._retired = 0
        self._generation = 0
        self._can_close = True
        self._lock = threading.Lock()

    async def acquire(self, server: AgentGymServer, limit: int) -> Instance:
        """Return an instance for one episode: a free one, a new one, or the next one that is released; first come,
        first served."""
        until, ticket = time.monotonic() + QUEUE, object()
        with self._lock:
            self._waiting.append(ticket)
        try:
            while True:
                create = False
                with self._lock:
                    capacity = limit if self._capacity is None else min(limit, self._capacity)
                    if self._waiting[0] is ticket:
                        if self._free:
                            return self._free.pop()
                        if create := len(self.instances) + self._creating < capacity:
                            self._creating += 1
                            self._waiting.popleft()  # others need not wait for this creation
                if create:
                    creation = asyncio.create_task(self._create(server))
                    try:
                        instance = await asyncio.shield(creation)
                    except asyncio.CancelledError:
                        creation.add_done_callback(self._adopt)  # the server creates the instance anyway
                        raise
                    if instance is not None:
                        return instance
                    with self._lock:
                        self._waiting.appendleft(ticket)
                elif time.monotonic() > until:
                    raise EnvironmentFailed(
                        f"AgentGym server: {server.url}: timed out after {QUEUE:g} s: all {capacity} instances are in "
                        "use; lower concurrency or raise environment.instances"
                    )
                else:
                    await asyncio.sleep(0.02)
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(ticket)

    async def _create(self, server: AgentGymServer) -> Instance | None:
        """Create an instance; return None if the server returned one that this pool already owns."""
        generation = self._generation
        try:
            number = await server.create()
        finally:
            with self._lock:
                self._creating -= 1
        with self._lock:
            if generation != self._generation:
                return None
            if number in self.instances:
                self._capacity = len(self.instances)
                logger.warning(
                    "the AgentGym server at %s is full: it returned instance %d twice; the limit is now %d instances",
                    server.url,
                    number,
                    self._capacity,
                )
                return None
            instance = self.instances[number] = Instance(number, generation)
        return instance

    def _adopt(self, creation: asyncio.Task[Instance | None]) -> None:
        """Release an instance whose episode was cancelled during its creation."""
        if not creation.cancelled() and creation.exception() is None and (instance := creation.result()) is not None:
            self.release(instance)

    def is_current(self, instance: Instance) -> bool:
        """Return False if an instance was lost because its server restarted or went down."""
        return instance.generation == self._generation

    def release(self, instance: Instance) -> None:
        """Return an instance to the pool after an episode."""
        with self._lock:
            if instance.generation == self._generation:
                instance.failures = 0
                self._free.append(instance)

    async def release_broken(self, server: AgentGymServer, instance: Instance) -> None:
        """Close an instance after a failed episode.

        If the server cannot close it, return it to the pool as the last choice; retire it after repeated failures.
        """
        if instance.generation != self._generation:
            return
        if self._can_close:
            closed = await server.close(instance)
            self._can_close = closed is not None
            if closed:
                self.forget(instance)
                return
        with self._lock:
            if instance.generation != self._generation:
                return
            instance.failures += 1
            if instance.failures < FAILURES or self._retired >= MAX_RETIRED:
                self._free.insert(0, instance)
                return
            self._retired += 1
        logger.warning(
            "instance %d of the AgentGym server at %s failed %d times in a row and is retired",
            instance.id,
            server.url,
            FAILURES,
        )
        self.forget(instance)

    def forget(self, instance: Instance) -> None:
        """Remove an instance that no longer exists."""
        with self._lock:
            if instance.generation == self._generation:
                self.instances.pop(instance.id, None)
                self._capacity = None

    def invalidate(self, instance: Instance) -> None:
        """Drop all instances of this instance's generation: the server restarted or is down."""
        with self._lock:
            if instance.generation == self._generation:
                self._generation += 1
                self.instances, self._free, self._capacity = {}, [], None

    def close_all(self, server: AgentGymServer) -> None:
        """Close all instances if the server supports it."""
        with self._lock:
            numbers, self.instances, self._free = list(self.instances), {}, []
            self._generation += 1
        server.close_all(numbers)


_pools: dict[tuple[int, str], tuple[InstancePool, AgentGymServer]] = {}
_lock = threading.Lock()


def pool_of(server: AgentGymServer) -> InstancePool:
    """Return the pool that all environments of this process share for a server."""
    with _lock:
        key = (os.getpid(), server.url + server.kind.prefix)  # a forked process must not use inherited pools
        if key not in _pools:
            _pools[key] = (InstancePool(), server)
        return _pools[key][0]


@atexit.register
def close_pools() -> None:
    """Close the instances of this process on all servers that support it."""
    for (pid, _), (pool, server) in list(_pools.items()):
        if pid == os.getpid() and pool.instances:
            pool.close_all(server)
