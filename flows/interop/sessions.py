"""Sessions of a server: each has one instance of the environment, and ends when its client closes it, or when it is
idle for too long."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from flows.interop.episode import EpisodeThread, ServedEpisode, Start
from flows.interop.source import EpisodeSource

Result = TypeVar("Result")

SESSIONS = 16
"""Default maximum number of sessions."""
IDLE = 600.0
"""Default seconds without a request after which a session is closed."""
CHECKS = 10
"""Checks for idle sessions within the idle limit."""


class CapacityReached(RuntimeError):
    """Request for a session beyond the maximum number."""


@dataclass(frozen=True)
class SessionLimits:
    """SessionLimits of a server."""

    sessions: int = SESSIONS
    """Maximum number of sessions."""
    idle: float = IDLE
    """Seconds without a request after which a session is closed."""


class Session:
    """One client's instance of the environment. Its requests are executed one after the other."""

    def __init__(self, id: str, thread: EpisodeThread):
        self.id = id
        self.episode_id = ""
        """Name of the episode that the client gave, or a generated one."""
        self.start: Start | None = None
        self.attached = False
        """True while a connection uses the session; it is then not closed as idle."""
        self.used = time.monotonic()
        self._thread = thread
        self._lock = asyncio.Lock()

    @property
    def episode(self) -> ServedEpisode:
        """Return the episode, for its counters."""
        return self._thread.episode

    async def reset(self, *, seed: int | None = None, scenario: str | None = None, episode_id: str = "") -> Start:
        """Start an episode. Raises InvalidRequest for an unknown scenario."""
        chosen = self.episode.source.scenario(id=scenario, seed=seed)
        self.start = None
        self.start = await self.call(lambda episode: episode.reset(chosen))
        self.episode_id = episode_id or secrets.token_hex(8)
        return self.start

    async def call(self, work: Callable[[ServedEpisode], Coroutine[Any, Any, Result]]) -> Result:
        """Return the result of an operation on the episode."""
        async with self._lock:
            self.used = time.monotonic()
            try:
                return await self._thread.call_async(work)
            finally:
                self.used = time.monotonic()

    @property
    def busy(self) -> bool:
        """True while a request is executed."""
        return self._lock.locked()

    async def close(self) -> None:
        """Close the instance."""
        await asyncio.to_thread(self._thread.close)


class Sessions:
    """Sessions of one server, at most `limits.sessions` at once."""

    def __init__(self, source: EpisodeSource, limits: SessionLimits | None = None):
        self.source, self.limits = source, limits or SessionLimits()
        self._sessions: dict[str, Session] = {}
        self._opening = 0
        self._by_name = asyncio.Lock()

    @property
    def most(self) -> int:
        """Return the maximum number of sessions: that of the server, or of the environment's instances."""
        return min(self.limits.sessions, self.source.instances or self.limits.sessions)

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, id: str) -> Session | None:
        """Return a session, or None if there is none, or if it was closed."""
        return self._sessions.get(id)

    async def open(self, id: str = "", *, attached: bool = False) -> Session:
        """Create a session with an instance of its own. Raises CapacityReached, and the errors of the environment."""
        if len(self._sessions) + self._opening >= self.most:
            reason = "--sessions" if self.most == self.limits.sessions else f"instances of {self.source.name}"
            raise CapacityReached(
                f"{self.most} sessions are open, the maximum of this server ({reason}); close one, or try again later"
            )
        self._opening += 1
        try:
            thread = await asyncio.to_thread(EpisodeThread, self.source)
        finally:
            self._opening -= 1
        session = Session(id or secrets.token_hex(16), thread)
        session.attached = attached
        self._sessions[session.id] = session
        return session

    async def ensure(self, id: str) -> Session:
        """Return the session with an id of the server's choice, created if there is none. Raises CapacityReached, and
        the errors of the environment."""
        async with self._by_name:
            return self.get(id) or await self.open(id)

    async def close(self, id: str) -> bool:
        """Close a session; return False if there is none."""
        session = self._sessions.pop(id, None)
        if session is not None:
            await session.close()
        return session is not None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Close idle sessions while the block runs, and all sessions at its end."""
        reaper = asyncio.create_task(self._close_idle())
        try:
            yield
        finally:
            reaper.cancel()
            await asyncio.gather(*(self.close(id) for id in list(self._sessions)), return_exceptions=True)

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(self.limits.idle / CHECKS)
            limit = time.monotonic() - self.limits.idle
            for session in list(self._sessions.values()):
                if not session.attached and not session.busy and session.used < limit:
                    await self.close(session.id)
