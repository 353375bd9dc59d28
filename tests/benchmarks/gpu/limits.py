"""Time limits of the parts of one process.

At its limit, a part is interrupted by an exception that it does not catch. A part that does not return then, because it
is in a kernel or in another library's code, is left behind: the process replaces itself by a new one, which resumes
with the next part. An error of the GPU that poisons the process ends in the same way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

GRACE = 15.0
"""Seconds in which a part ends after its limit."""


class TimeUp(BaseException):
    """End of a part's time. No `Exception`, so that no part takes it for an error of one of its sides."""


@contextlib.contextmanager
def limit(seconds: float, stuck: Callable[[], Any]) -> Iterator[None]:
    """Raise TimeUp in the context after `seconds`; call `stuck` in another thread if it does not end within `GRACE`."""

    def interrupt(*_: Any) -> NoReturn:
        raise TimeUp

    previous = signal.signal(signal.SIGALRM, interrupt)
    watchdog = threading.Timer(seconds + GRACE, stuck)
    watchdog.daemon = True
    watchdog.start()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        watchdog.cancel()


@contextlib.contextmanager
def session(words: list[str], log: Path, **options: Any) -> Iterator[Any]:
    """Start Python in a session of its own, and end all of the session at the end of the context. Output without a pipe
    goes to a file."""
    with open(log, "wb") as output:
        options = {"stdin": subprocess.DEVNULL, "stdout": output, **options}
        process = subprocess.Popen([sys.executable, *words], stderr=output, start_new_session=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def restart(words: list[str]) -> NoReturn:
    """Replace this process by one that resumes. Ends its child processes."""
    end_children()
    os.execv(sys.executable, [sys.executable, "-m", "tests.benchmarks.gpu", *words, "--resume"])


def end_children() -> None:
    """End all processes that this one started, with theirs."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=5)
