"""Classification of errors raised by foreign code: failures of that code or not, transient or permanent, and the HTTP
status behind them.

`is_foreign` is the boundary between Espalier and code that it calls: engines, environments, agents and rewards. The
caller records a foreign exception as a failure that names the boundary, and lets any other propagate. Libraries wrap
errors in different ways, so `passes` and `status_of` inspect the whole chain of causes.
"""

from __future__ import annotations

import asyncio
import errno
import re
from typing import Any

from components.errors import ResourceError, SpecError

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
