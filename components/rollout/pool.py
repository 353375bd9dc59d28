"""A pool of environment instances; each serves one episode at a time.

Instances are reused, the most recently used one first. An instance is closed after a failed episode or after its
maximum number of episodes. The number of concurrent instances is limited by `most` and by the environment itself;
further episodes wait in first-in, first-out order.

Attributes of an environment class or instance:

    instances: int       maximum number of concurrent instances per process: a limit of memory, a license or a server
    good_for: int        number of episodes after which an instance is closed and replaced
    lasting: bool        the instance does not depend on the event loop and is reused across stages of a run, for
                         environments that are slow to start

Other instances are closed at the end of their stage, and all of them at the end of the pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from components.aio import run
from components.environments.protocol import Environment
from components.errors import EnvironmentFailed
from components.rollout.agent import ask

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 10.0
"""Time limit in seconds to close an environment."""


class Lease:
    """An instance that serves one episode, and its state afterwards."""

    __slots__ = ("abandoned", "environment", "reusable", "served")

    def __init__(self, environment: Environment):
        self.environment = environment
        self.served = 0
        self.reusable = True
        """True if another episode may use the instance; otherwise it is closed."""
        self.abandoned = False
        """True if a thread may still use the instance: it is neither reused nor closed."""


class EnvironmentPool:
    """Instances built by `make`, used on one event loop at a time. most: maximum number of instances; None:
    unlimited."""

    def __init__(self, make: Callable[[], Environment], most: int | None = None):
        self.most = most
        self._make = make
        self._free: list[Lease] = []
        self._out = 0
        self._own_limit: int | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Lease]:
        """Yield an instance for one episode; wait if all are in use. The instance is closed if the episode raises or is
        cancelled. Raises EnvironmentFailed if it cannot be built, EnvironmentUnavailable if the cause is transient."""
        await self._enter()
        try:
            lease = self._free.pop() if self._free else await self._build()
            lease.reusable = False  # until the episode sets it
            try:
                yield lease
            finally:
                lease.served += 1
                good_for = getattr(lease.environment, "good_for", None)
                if lease.reusable and (good_for is None or lease.served < good_for):
                    self._free.append(lease)
                elif not lease.abandoned:
                    await close(lease.environment)
        finally:
            self._leave()

    async def end_stage(self) -> None:
        """Close the instances that depend on the running event loop, at the end of a stage."""
        free, self._free = self._free, []
        self._free = [lease for lease in free if getattr(lease.environment, "lasting", False)]
        await _close_all([lease.environment for lease in free if not getattr(lease.environment, "lasting", False)])

    def close(self) -> None:
        """Close all remaining instances, at the end of a run."""
        free, self._free = self._free, []
        if free:
            run(_close_all([lease.environment for lease in free]))

    async def _build(self) -> Lease:
        def build() -> Environment:
            return self._make()

        environment = await ask(build)
        self._own_limit = getattr(environment, "instances", None)
        return Lease(environment)

    async def _enter(self) -> None:
        """Wait until the limits allow one more instance."""
        limits = [limit for limit in (self.most, self._own_limit) if limit is not None]
        if not self._waiting and (not limits or self._out < min(limits)):
            self._out += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # cancelled after its turn came: pass the turn on
            elif turn in self._waiting:  # `_leave` may have skipped it already
                self._waiting.remove(turn)
            raise

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._out -= 1


async def close(environment: Environment) -> None:
    """Close an environment; log a warning if that fails."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await ask(environment.close)
    except EnvironmentFailed as error:
        logger.warning("an environment did not close: %s", error)
    except TimeoutError:
        logger.warning("an environment did not close within %g s", CLOSE_TIMEOUT)


async def _close_all(environments: list[Environment]) -> None:
    await asyncio.gather(*map(close, environments))
