"""Classification of errors raised by third-party code: transient or permanent, and the HTTP status behind them.

Libraries wrap errors in different ways, so the whole chain of causes is inspected.
"""

from __future__ import annotations

import errno
import re
from typing import Any

PASSING = (429, 502, 503, 504)
"""HTTP statuses of transient errors: too many requests, bad gateway, unavailable, gateway timeout."""
CONNECTION_ERRORS = ("ConnectError", "ConnectTimeout", "ReadError", "WriteError", "CloseError", "RemoteProtocolError")
"""Names of connection errors in httpx and httpcore; Python's own derive from ConnectionError."""
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL = re.compile(r"No space left on device|Disk quota exceeded|File too large|database or disk is full")
DEPTH = 16
"""Limit on the errors inspected in one chain."""


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
