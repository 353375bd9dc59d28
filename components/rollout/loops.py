"""Coroutines from plain functions, whether or not a loop is running."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs to its end, on a loop of its own; in a thread where this one has a loop already, as a notebook has."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = queue.SimpleQueue()

    async def told() -> Result:
        task = asyncio.current_task()
        assert task is not None
        started.put((task.get_loop(), task))
        return await work

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(asyncio.run, told())
        loop, task = started.get()
        try:
            return result.result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise
