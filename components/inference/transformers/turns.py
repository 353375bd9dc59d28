"""Turns of the embedded engines that compute together.

With a pass at a time, in the order in which the engines ask, the requests of each pass do not depend on how long the
others take. So all samples are the same in every run, as those of a single engine.
"""

from __future__ import annotations

import asyncio


class Turns:
    """Passes of several engines, one at a time on each event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    def turn(self) -> asyncio.Lock:
        """Return the lock to hold during a pass on the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._lock = loop, asyncio.Lock()
        return self._lock
