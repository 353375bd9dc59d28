"""Classification of errors raised by foreign code: failures of that code or not, transient or permanent, and the HTTP
status behind them.

`is_foreign` is the boundary between Espalier and code that it calls: engines, environments, agents and rewards. The
caller records a foreign exception as a failure that names the boundary, and lets any other propagate. Libraries wrap
errors in different ways, so `passes` and `status_of` inspect the whole chain of causes.

The message of a foreign exception names the line of the user's code that raised it (`described`); its traceback goes to
the log (`log_traceback`), once for each line (`FirstTraceback`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from components.errors import EspalierError, ResourceError, SpecError

logger = logging.getLogger(__name__)

PASSING = (429, 502, 503, 504)
"""HTTP statuses of transient errors: too many requests, bad gateway, unavailable, gateway timeout."""
CONNECTION_ERRORS = ("ConnectError", "ConnectTimeout", "ReadError", "WriteError", "CloseError", "RemoteProtocolError")
"""Names of connection errors in httpx and httpcore; Python's own derive from ConnectionError."""
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL = re.compile(r"No space left on device|Disk quota exceeded|File too large|database or disk is full")
DEPTH = 16
"""Limit on the errors inspected in one chain."""


def is_foreign(error: BaseException, *ours: type[Exception]) -> bool:
    """Return True if an exception that foreign code raised is a failure of that code.

    False: a user error, which every call would meet (SpecError, ResourceError); an error of the types `ours`; an
    interrupt of the process; the cancellation of the running task. SystemExit is a failure, because foreign code must
    not end the run; so is a CancelledError without a request to cancel this task: the code cancelled a task of its own.
    """
    if isinstance(error, asyncio.CancelledError):
        return not _is_cancelled()
    return isinstance(error, Exception | SystemExit) and not isinstance(error, (SpecError, ResourceError, *ours))


def _is_cancelled() -> bool:
    """Return True if the running task is being cancelled, or if no task runs."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return True
    return task is None or task.cancelling() > 0


def passes(error: BaseException | None) -> bool:
    """Return True if a retry may succeed: broken connection, refused connection, or overloaded server."""
    return any(_broke(cause) or status_of(cause) in PASSING for cause in causes(error))


def never_connected(error: BaseException | None) -> bool:
    """Return True if no connection to the server was established: refused, or an unknown host."""
    return any(
        isinstance(cause, ConnectionRefusedError | socket.gaierror)
        or type(cause).__name__ in ("ConnectError", "ClientConnectorError", "ClientConnectorDNSError")
        for cause in causes(error)
    )


def _broke(error: Exception) -> bool:
    kind = type(error)
    httpx = kind.__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")
    return isinstance(error, ConnectionError) or (httpx and kind.__name__ in CONNECTION_ERRORS)


def causes(error: BaseException | None) -> list[Exception]:
    """Return the error and its causes, nearest first."""
    pending: list[Any] = [error]
    visited: list[Exception] = []
    while pending and len(visited) < DEPTH:
        cause = pending.pop(0)
        if not isinstance(cause, Exception) or any(cause is other for other in visited):
            continue
        visited.append(cause)
        pending += [
            cause.__cause__,
            cause.__context__,
            getattr(cause, "reason", None),
            getattr(cause, "os_error", None),
        ]
        pending += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        pending += [part for part in cause.args if isinstance(part, BaseException)]
    return visited


def out_of_space(error: BaseException | None) -> str | None:
    """Return the message of the first error in the chain that reports a full disk or a file size limit, else None.

    Libraries in other languages (safetensors, sqlite) wrap the OSError, so the message text is matched as well."""
    for cause in causes(error):
        if (isinstance(cause, OSError) and cause.errno in FULL_ERRNOS) or FULL.search(str(cause)):
            return str(cause)
    return None


def status_of(error: Exception) -> int | None:
    """Return the HTTP status behind an error of requests, httpx, aiohttp or urllib; None without one."""
    response = getattr(error, "response", None)
    for holder, name in ((response, "status_code"), (error, "status_code"), (error, "status"), (error, "code")):
        if isinstance(status := getattr(holder, name, None), int):
            return status
    return None


class RemoteTraceback(Exception):
    """Traceback of an exception in another process, as text: the cause of the exception that stands for it here."""


def described(error: BaseException) -> str:
    """Return the type, the message and the place of a foreign exception: `KeyError: 'ask' (stock.py:12, in step)`."""
    return f"{type(error).__name__}: {error}{place(error)}"


def place(error: BaseException) -> str:
    """Return ` (FILE:LINE, in FUNCTION)` of the innermost frame of the user's code; empty if no frame is the user's.

    The user's code is every file outside Espalier, the standard library and installed packages. FILE is relative to the
    entry of `sys.path` that it is imported from, because messages are stored in artifacts, which hold no path of a
    machine."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    code, line = next((entry for entry in reversed(frames) if _is_users(entry[0].co_filename)), (None, 0))
    return "" if code is None else f" ({_relative(code.co_filename)}:{line}, in {code.co_name})"


def log_traceback(error: BaseException) -> None:
    """Log the traceback of a foreign exception, which is recorded as a failure by its message alone. An error that
    Espalier itself raises needs none."""
    if isinstance(error, EspalierError) and not place(error) and not isinstance(error.__cause__, RemoteTraceback):
        return
    logger.info("%s", described(error), exc_info=error)


class FirstTraceback(logging.Filter):
    """Filter of a log handler: passes the first record of `log_traceback` for each type of exception and line of code,
    so that a log does not repeat a traceback for each episode."""

    def __init__(self) -> None:
        super().__init__()
        self._places: set[tuple[str, ...]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != __name__ or record.exc_info is None or record.exc_info[1] is None:
            return True
        at = _origin(record.exc_info[1])
        first = at not in self._places
        self._places.add(at)
        return first


def _origin(error: BaseException) -> tuple[str, ...]:
    """Return the type of an exception, and the file and the line of its first cause."""
    kind, cause = type(error).__name__, error
    while cause.__cause__ is not None and cause.__cause__ is not error:
        cause = cause.__cause__
    if isinstance(cause, RemoteTraceback):
        return kind, str(cause).rpartition("  File ")[2].partition("\n")[0]
    frames = [(frame.f_code.co_filename, str(line)) for frame, line in traceback.walk_tb(cause.__traceback__)]
    return kind, *(frames[-1] if frames else ())


@cache
def _other_folders() -> tuple[str, ...]:
    """Return the folders of Espalier's own packages and of the standard library."""
    root = Path(__file__).parent.parent
    folders = [str(root / name) for name in ("components", "flows", "hydra_plugins")]
    folders += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    return tuple(os.path.join(folder, "") for folder in folders)


def _is_users(file: str) -> bool:
    return not file.startswith(("<", *_other_folders())) and not {"site-packages", "dist-packages"} & {
        *Path(file).parts
    }


def _relative(file: str) -> str:
    """Return a file's path below the longest entry of `sys.path` that holds it; its name if none does."""
    roots = [os.path.join(os.path.abspath(entry), "") for entry in sys.path]
    root = max((root for root in roots if file.startswith(root)), key=len, default=None)
    return Path(file).name if root is None else file[len(root) :]
