"""Handling of Ctrl-C (SIGINT) and SIGTERM with a bounded time to exit.

The first signal raises KeyboardInterrupt in the main thread, so that cleanup runs while the stack unwinds: drafts,
child processes, states in MLflow and Prefect. If cleanup takes longer than `LIMITS`, a thread starts `last_words`,
waits for them for `LAST_WORDS_LIMIT`, and ends the process. A second Ctrl-C starts the last words at once; other
further signals are ignored.

Python runs a signal handler between two steps of its main thread. A library that computes outside Python (a gradient, a
tokenizer, a query) delays it until it returns, so the thread learns of signals from a pipe (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import atexit
import logging
import os
import select
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
AGAIN = 0.5
"""Seconds after the first signal before which another does not count: launchers forward the Ctrl-C of a terminal that
also reaches the process itself."""
EXIT_CODE = 130


class Interruption:
    """Signal handlers for the duration of a run, as a context manager for the main thread."""

    def __init__(self) -> None:
        self.last_words: list[Callable[[], None]] = []
        """Functions called before a forced exit, each in a thread of its own, so that none waits for another. An
        exception in one is logged."""
        self._stopped = threading.Event()
        self._before: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in LIMITS}
            read, write = self._pipe = os.pipe()
            os.set_blocking(write, False)
            self._wakeup_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(read,), name="interrupt", daemon=True).start()
            self.install()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is None:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._pipe[1])  # ends the thread
        self._pipe = None
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # returned by getsignal

    def install(self) -> None:
        """Install the handlers. Called again once a flow has started: Prefect then replaces the SIGTERM handler."""
        if threading.current_thread() is threading.main_thread():
            assert self._pipe, "install() needs the context manager, which restores the previous handlers"
            signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            for number in LIMITS:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            raise KeyboardInterrupt

    def _watch(self, pipe: int) -> None:
        """End the process after the limit of the first signal, or at a second Ctrl-C; return at the end of the pipe."""
        first: float | None = None
        limit = 0.0
        while True:
            remaining = None if first is None else max(0.0, first + limit - time.monotonic())
            if not select.select([pipe], [], [], remaining)[0]:
                return self._force(f"cleanup did not finish within {limit:.1f} s")
            received = os.read(pipe, 1)
            if not received:
                return os.close(pipe)
            now, number = time.monotonic(), received[0]
            if first is None and number in LIMITS:
                first, limit = now, LIMITS[signal.Signals(number)]
            elif first is not None and number == signal.SIGINT and now - first >= AGAIN:
                return self._force("interrupted again")

    def _force(self, reason: str) -> None:
        """Call the last words and end the process."""
        deadline = time.monotonic() + LAST_WORDS_LIMIT
        threads = [threading.Thread(target=self._report_forced_exit, args=(reason,), daemon=True)]
        threads += [threading.Thread(target=_call, args=(callback,), daemon=True) for callback in self.last_words]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        os._exit(EXIT_CODE)

    @staticmethod
    def _report_forced_exit(reason: str) -> None:
        logger.warning("%s: ending the process; run it again to resume", reason)


os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # signals of a forked child are not this process's


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
