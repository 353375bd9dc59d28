"""Engine of a server that outlives its policies: calls during a training wait, and the new policy answers them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from components.aio import in_thread
from components.errors import StalePolicy
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest, ModelEngine

POLL = 0.05
"""Seconds between two looks of a waiting call."""


class ServedPolicy:
    """Engine of the current step, as `components.inference.protocol.Engine`."""

    policy = BASE_POLICY
    """Version of requests for any step."""

    def __init__(self) -> None:
        self.step = 0
        self._engine: ModelEngine | None = None
        self._closed = False
        self._running = 0
        self._changed = threading.Condition()

    def use(self, engine: ModelEngine, step: int) -> None:
        """Answer with an engine, whose policy is that of a step."""
        self._engine, self.step = engine, step

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the response of the current step. Raises StalePolicy for a request for another one."""
        while not self._enter():
            await asyncio.sleep(POLL)
        try:
            assert self._engine is not None  # loaded before the server starts
            if request.policy not in (BASE_POLICY, str(self.step), self._engine.policy):
                raise StalePolicy(f"asked for step {request.policy}, but the server has step {self.step} only")
            return await self._engine.chat(replace(request, policy=self._engine.policy))
        finally:
            self._leave()

    @asynccontextmanager
    async def replaced(self) -> AsyncIterator[None]:
        """Wait for the end of the running calls, free the engine's memory, and let new calls wait within the block."""
        self._closed = True
        try:
            await in_thread(self._wait_until_idle)
            if self._engine is not None:
                self._engine.release()
            yield
        finally:
            self._closed = False

    def _enter(self) -> bool:
        with self._changed:
            self._running += not self._closed
            return not self._closed

    def _leave(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _wait_until_idle(self) -> None:
        with self._changed:  # each call has a time limit of its own
            self._changed.wait_for(lambda: not self._running)
