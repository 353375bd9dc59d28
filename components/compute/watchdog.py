"""A watchdog for a stage: where nothing has moved for too long, it says what everything was doing, and ends the wait.

It strikes by SIGUSR2, which interrupts whatever the main thread waits in (a lock, a socket, an event loop, a sleep).
What is raised there is a KeyboardInterrupt: it ends the stage as Ctrl-C would, past everything that makes data of the
errors of a user's code, and saves what Ctrl-C saves. `watch` turns it into WaitTimeout. A computation inside of a
library is interrupted when it comes back. No signal reaches another thread: there it strikes by `end`, a function that
makes the block raise.
"""

from __future__ import annotations

import asyncio
import gc
import io
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from components.errors import WaitTimeout

SIGNAL = signal.SIGUSR2


class Strike(KeyboardInterrupt):
    """What a watchdog raises in the main thread."""


class Watchdog:
    """Make it with `watch`. what: for messages. limit: seconds without `touch`. report: told what every thread and
    every asyncio task was doing, before the strike. end: strikes; None is the signal."""

    def __init__(self, what: str, limit: float, report: Callable[[str], None], end: Callable[[], None] | None = None):
        self.what = what
        self.limit = limit
        self.struck = False
        self._report = report
        self._end = end or _interrupt
        self._touched = time.monotonic()
        self._resting = False
        self._over = threading.Event()
        self._striking = threading.Lock()

    def touch(self) -> None:
        """Something has moved."""
        self._touched = time.monotonic()
        self._resting = False

    def rest(self) -> None:
        """Until the next `touch`, something is awaited that has a limit of its own."""
        self._resting = True

    def _run(self) -> None:
        while not self._over.wait(min(1.0, self.limit / 4)):
            if self._resting or time.monotonic() - self._touched < self.limit:
                continue
            try:
                self._report(doing())
            finally:  # whatever the report came to
                with self._striking:
                    if not self._over.is_set():
                        self.struck = True
                        self._end()
            return

    def _stop(self) -> None:
        """After this there is no strike."""
        with self._striking:
            self._over.set()

    def _strike(self, number: int, frame: FrameType | None) -> None:
        where = traceback.extract_stack(frame)[-1] if frame is not None else None
        raise Strike(self._words(f" (in {where.name}, {where.filename}:{where.lineno})" if where is not None else ""))

    def _words(self, at: str = "") -> str:
        return (
            f"{self.what}: nothing has moved for {self.limit:g} s{at}. What each thread and task was doing is in the "
            "log. If it only needs longer, raise compute.stall_timeout; the same command goes on from what is finished"
        )


@contextmanager
def watch(
    what: str, limit: float, report: Callable[[str], None], end: Callable[[], None] | None = None
) -> Iterator[Watchdog]:
    """Watches over the block, and raises WaitTimeout out of it; with a limit of 0, and outside of the main thread
    without an `end`, nothing is watched."""
    dog = Watchdog(what, limit, report, end)
    if limit == 0 or (end is None and threading.current_thread() is not threading.main_thread()):
        yield dog
        return
    thread = threading.Thread(target=dog._run, name=f"watchdog of {what}", daemon=True)
    if end is not None:
        thread.start()
        try:
            yield dog
        except BaseException:
            if dog.struck:
                raise WaitTimeout(dog._words()) from None
            raise
        finally:
            dog._stop()
        if dog.struck:  # just as the block came to its end; what ran it takes nothing more
            raise WaitTimeout(dog._words())
        return
    before = signal.signal(SIGNAL, dog._strike)
    thread.start()
    try:
        try:
            yield dog
        finally:
            dog._stop()
    except Strike as strike:
        raise WaitTimeout(str(strike)) from None
    finally:
        signal.signal(SIGNAL, before)


def _interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


def doing() -> str:
    """The stack of every thread and of every asyncio task that is not done, as text."""
    out = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        print(f"thread {names.get(ident, ident)}:", file=out)
        traceback.print_stack(frame, file=out)
    for thing in gc.get_objects():  # tasks belong to loops in other threads, which asyncio does not list
        if issubclass(type(thing), asyncio.Task) and not thing.done():  # isinstance would ask proxies for their class
            print(f"task {thing.get_name()}:", file=out)
            thing.print_stack(file=out)
    return out.getvalue()
