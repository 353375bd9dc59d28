"""Watchdog of a stage: without progress for too long, it reports the stacks of all threads and tasks and ends the wait.

It strikes with SIGUSR2, which interrupts any wait of the main thread (a lock, a socket, an event loop, a sleep). The
handler raises a KeyboardInterrupt: it ends the stage like Ctrl-C, bypasses code that records exceptions of user code as
data, and saves the same state as Ctrl-C. `watch` converts it to WaitTimeout. A computation inside a library is
interrupted when it returns. Signals do not reach other threads: there the watchdog calls `end`, a function that makes
the block raise.
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
    """Interruption raised by a watchdog in the main thread."""


class Watchdog:
    """Watchdog, created by `watch`. name: for messages. limit: seconds without `touch`. report: called before the
    strike with the stacks of every thread and asyncio task. end: ends the block; None uses the signal."""

    def __init__(self, name: str, limit: float, report: Callable[[str], None], end: Callable[[], None] | None = None):
        self._name = name
        self.limit = limit
        self.triggered = False
        self._report = report
        self._end = end or _interrupt
        self._touched = time.monotonic()
        self._resting = False
        self._over = threading.Event()
        self._end_lock = threading.Lock()

    def touch(self) -> None:
        """Record progress."""
        self._touched = time.monotonic()
        self._resting = False

    def pause(self) -> None:
        """Pause until the next `touch`, during a wait that has a timeout of its own."""
        self._resting = True

    def _run(self) -> None:
        while not self._over.wait(min(1.0, self.limit / 4)):
            if self._resting or time.monotonic() - self._touched < self.limit:
                continue
            try:
                self._report(stack_dump())
            finally:  # also if the report fails
                with self._end_lock:
                    if not self._over.is_set():
                        self.triggered = True
                        self._end()
            return

    def _stop(self) -> None:
        """Stop the watchdog; it does not strike afterwards."""
        with self._end_lock:
            self._over.set()

    def _strike(self, number: int, frame: FrameType | None) -> None:
        location = traceback.extract_stack(frame)[-1] if frame is not None else None
        place = "" if location is None else f" (in {location.name}, {location.filename}:{location.lineno})"
        raise Strike(self._message(place))

    def _message(self, place: str = "") -> str:
        return (
            f"{self._name}: no progress for {self.limit:g} s{place}. The stacks of all threads and tasks are in the "
            "log. If the stage only needs more time, raise compute.stall_timeout; the same command resumes it"
        )


@contextmanager
def watch(
    name: str, limit: float, report: Callable[[str], None], end: Callable[[], None] | None = None
) -> Iterator[Watchdog]:
    """Watch the block, and raise WaitTimeout from it. Inactive with a limit of 0, and outside the main thread without
    an `end`."""
    watchdog = Watchdog(name, limit, report, end)
    if limit == 0 or (end is None and threading.current_thread() is not threading.main_thread()):
        yield watchdog
        return
    thread = threading.Thread(target=watchdog._run, name=f"watchdog of {name}", daemon=True)
    if end is not None:
        thread.start()
        try:
            yield watchdog
        except BaseException:
            if watchdog.triggered:
                raise WaitTimeout(watchdog._message()) from None
            raise
        finally:
            watchdog._stop()
        if watchdog.triggered:  # just as the block ended, so that nothing in it raised
            raise WaitTimeout(watchdog._message())
        return
    before = signal.signal(SIGNAL, watchdog._strike)
    thread.start()
    try:
        try:
            yield watchdog
        finally:
            watchdog._stop()
    except Strike as strike:
        raise WaitTimeout(str(strike)) from None
    finally:
        signal.signal(SIGNAL, before)


def _interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


def stack_dump() -> str:
    """Return the stacks of every thread and of every unfinished asyncio task, as text."""
    out = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        print(f"thread {names.get(ident, ident)}:", file=out)
        traceback.print_stack(frame, file=out)
    for candidate in gc.get_objects():  # asyncio does not list tasks of loops in other threads
        if issubclass(type(candidate), asyncio.Task) and not candidate.done():  # isinstance would trigger proxies
            print(f"task {candidate.get_name()}:", file=out)
            candidate.print_stack(file=out)
    return out.getvalue()
