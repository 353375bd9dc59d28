"""Instances of an environment, each lent to one episode at a time.

An instance that has served an episode serves the next one, the one that was used last first. One in which an episode
failed is closed and never lent again, and so is one that has served as many episodes as it is good for. There are
never more than `most` at once, nor more than the environment says of itself; further episodes wait, the longest
first.

An environment says with attributes, of its class or of an instance:

    instances: int       most at once in a process: what memory, a licence or a server bears
    good_for: int        episodes after which an instance is closed, and another is made
    lasting: bool        an instance holds nothing of the event loop that it is used on, and stays from one stage of a
                         run to the next, as what takes long to start should

Any other instance is closed at the end of its stage, and all of them at the end of their pool.
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
"""Seconds that an environment may take to close."""


class Lent:
    """An instance, and what became of it."""

    __slots__ = ("environment", "left", "served", "whole")

    def __init__(self, environment: Environment):
        self.environment = environment
        self.served = 0
        self.whole = True
        """Whether it may be lent again; if not, it is closed."""
        self.left = False
        """Whether somebody may still be in it: then it is left to them, neither lent nor closed."""


class Pool:
    """Instances that `make` builds. Used on one loop at a time. most: None means as many as are asked for."""

    def __init__(self, make: Callable[[], Environment], most: int | None = None):
        self.most = most
        self._make = make
        self._free: list[Lent] = []
        self._out = 0
        self._own_limit: int | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Lent]:
        """An instance for one episode; waits for one where all are in use. One whose episode raised or was cancelled
        is closed. Raises EnvironmentFailed where it cannot be built, EnvironmentAway where that may pass."""
        await self._enter()
        try:
            one = self._free.pop() if self._free else await self._made()
            one.whole = False  # until the episode says so
            try:
                yield one
            finally:
                one.served += 1
                good_for = getattr(one.environment, "good_for", None)
                if one.whole and (good_for is None or one.served < good_for):
                    self._free.append(one)
                elif not one.left:
                    await close(one.environment)
        finally:
            self._leave()

    async def rest(self) -> None:
        """Closes what may not outlast the running loop: the end of a stage."""
        free, self._free = self._free, []
        self._free = [one for one in free if getattr(one.environment, "lasting", False)]
        await _close_all([one.environment for one in free if not getattr(one.environment, "lasting", False)])

    def close(self) -> None:
        """Closes all that is left: the end of a run."""
        free, self._free = self._free, []
        if free:
            run(_close_all([one.environment for one in free]))

    async def _made(self) -> Lent:
        def build() -> Environment:
            return self._make()

        environment = await ask(build)
        self._own_limit = getattr(environment, "instances", None)
        return Lent(environment)

    async def _enter(self) -> None:
        """Waits until there may be one more."""
        limits = [one for one in (self.most, self._own_limit) if one is not None]
        if not self._waiting and (not limits or self._out < min(limits)):
            self._out += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # it had its turn already: the next one takes it
            elif turn in self._waiting:  # one that leaves may have passed over it already
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
    """Closes an environment; one that fails at it costs a warning, not the episodes."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await ask(environment.close)
    except EnvironmentFailed as error:
        logger.warning("an environment did not close: %s", error)
    except TimeoutError:
        logger.warning("an environment did not close within %g s", CLOSE_TIMEOUT)


async def _close_all(environments: list[Environment]) -> None:
    await asyncio.gather(*map(close, environments))
