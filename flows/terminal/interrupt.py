"""Handling of Ctrl-C (SIGINT) and SIGTERM with a bounded time to exit.

The first signal raises KeyboardInterrupt in the main thread, so that cleanup runs while the stack unwinds: drafts,
child processes, states in MLflow and Prefect. If cleanup takes longer than `LIMITS` (a library computes or holds a
lock), a thread calls `last_words` and ends the process. Further signals are ignored.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, Self

logger = logging.getLogger(__name__)

LIMITS = {signal.SIGINT: 3.5, signal.SIGTERM: 25.0}
"""Seconds from the signal to the forced exit. For Ctrl-C a user waits. A preempted machine sends SIGTERM about 30 s
before it stops, and training saves its state in that time."""
EXIT_CODE = 130


class Interruption:
    """Signal handlers for the duration of a run, as a context manager for the main thread."""

    def __init__(self) -> None:
        self.last_words: list[Callable[[], None]] = []
        """Functions called before a forced exit, last added first. An exception in one is logged and skipped."""
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
        logger.warning("cleanup did not finish within %.1f s: ending the process", limit)
        for callback in reversed(self.last_words):
            try:
                callback()
            except Exception:
                logger.exception("a callback before the forced exit failed")
        os._exit(EXIT_CODE)


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
