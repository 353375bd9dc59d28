"""Ctrl-C and SIGTERM: stop at once, and certainly.

The first signal raises KeyboardInterrupt where the program is, so that everything is put away on the way out: drafts,
children, MLflow's and Prefect's states. If that is not done within `LIMITS` seconds, because some library is deep in a
computation or holds a lock, a thread does what must be done (`last_words`) and ends the process. Further signals
change nothing about that.
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
"""Seconds from the signal to the hard end. A person waits for Ctrl-C; SIGTERM is what a machine that is taken away
sends half a minute before, and a training saves its state in that time."""
EXIT_CODE = 130


class Interruption:
    """Handles signals while a run goes on; a context manager for the main thread."""

    def __init__(self) -> None:
        self.last_words: list[Callable[[], None]] = []
        """Called, the latest first, before a hard end; each is given up when it raises."""
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
            signal.signal(number, handler)  # type: ignore[arg-type]  # it came from getsignal

    def install(self) -> None:
        """Takes the signals (again: Prefect puts its own handler for SIGTERM over ours when a flow starts)."""
        if threading.current_thread() is threading.main_thread():
            assert self._before, "only inside the context, which puts the handlers back"
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
        logger.warning("not stopped after %.1f s: ending the process", limit)
        for words in reversed(self.last_words):
            try:
                words()
            except Exception:
                logger.exception("while ending the process")
        os._exit(EXIT_CODE)


def leave(main: Callable[[], int | None]) -> NoReturn:
    """Runs a command and ends the process with its exit code. What is registered with atexit runs and the streams are
    flushed, but the interpreter is not taken apart: with torch, MLflow and Prefect loaded this takes seconds."""
    try:
        code: object = main()
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001  # what Python would do: print it and exit with 1
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)
