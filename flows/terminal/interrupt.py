"""Handling of Ctrl-C (SIGINT) and SIGTERM with a bounded time to exit.

The first signal raises KeyboardInterrupt in the main thread, so that cleanup runs while the stack unwinds: drafts,
child processes, states in MLflow and Prefect. If cleanup takes longer than `LIMITS` (a library computes or holds a
lock), a thread starts `last_words`, waits for them for `LAST_WORDS_LIMIT`, and ends the process. Further signals are
ignored.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, Self

logger = logging.getLogger(__name__)

LIMITS = {signal.SIGINT: 2.0, signal.SIGTERM: 25.0}
"""Seconds from the signal to the last words. For Ctrl-C a user waits. A preempted machine sends SIGTERM about 30 s
before it stops, and training saves its state in that time."""
LAST_WORDS_LIMIT = 0.7
"""Seconds from the start of the last words to the forced exit: a locked database can block them for long."""
EXIT_CODE = 130


class Interruption:
    """Signal handlers for the duration of a run, as a context manager for the main thread."""

    def __init__(self) -> None:
        self.last_words: list[Callable[[], None]] = []
        """Functions called before a forced exit, each in a thread of its own, so that none waits for another. An
        exception in one is logged."""
        self._stopped = threading.Event()
        self._over = threading.Event()
        self._before: dict[int, object] = {}

    @property
    def happened(self) -> bool:
        return self._stopped.is_set()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # returned by getsignal

    def install(self) -> None:
        """Install the handlers. Called again once a flow has started: Prefect then replaces the SIGTERM handler."""
        if threading.current_thread() is threading.main_thread():
            assert self._before, "install() needs the context manager, which restores the previous handlers"
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stopped.is_set():
            return
        self._stopped.set()
        limit = LIMITS[signal.Signals(number)]
        threading.Thread(target=self._enforce, args=(limit,), name="interrupt", daemon=True).start()
        raise KeyboardInterrupt

    def _enforce(self, limit: float) -> None:
        if self._over.wait(limit):
            return
        deadline = time.monotonic() + LAST_WORDS_LIMIT
        threads = [threading.Thread(target=self._report_forced_exit, args=(limit,), daemon=True)]
        threads += [threading.Thread(target=_call, args=(callback,), daemon=True) for callback in self.last_words]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        os._exit(EXIT_CODE)

    @staticmethod
    def _report_forced_exit(limit: float) -> None:
        logger.warning("cleanup did not finish within %.1f s: ending the process; run it again to resume", limit)


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:
        logger.exception("a callback before the forced exit failed")


def leave(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with its exit code.

    atexit callbacks run and the streams are flushed. Interpreter shutdown is skipped: with torch, MLflow and Prefect
    imported it takes seconds.
    """
    try:
        code: object = main()
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001  # as Python does: print the traceback and exit with 1
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)
