"""Turns of several embedded engines that share a device."""

from __future__ import annotations

import asyncio


class Turns:
    """Passes of several engines that compute together, one at a time on each event loop.

    The passes come in the order in which the engines ask, so the requests of each do not depend on how long the others
    take, and all samples are the same in every run, as those of a single engine.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    def turn(self) -> asyncio.Lock:
        """Return the lock to hold during a pass on the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._lock = loop, asyncio.Lock()
        return self._lock
