"""What lies behind an error of somebody else's code: whether it may pass, and which status of HTTP it stands for.

Libraries wrap errors in their own ways, so the whole chain of causes is looked at.
"""

from __future__ import annotations

import errno
import re
from typing import Any

PASSING = (429, 502, 503, 504)
"""Statuses of HTTP: too many requests, bad gateway, unavailable, gateway timeout."""
BROKEN = ("ConnectError", "ConnectTimeout", "ReadError", "WriteError", "CloseError", "RemoteProtocolError")
"""Errors of httpx, and of what it stands on, for a line that broke or never was; Python's own are ConnectionError."""
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL = re.compile(r"No space left on device|Disk quota exceeded|File too large|database or disk is full")
DEPTH = 16
"""Errors of a chain that are looked at."""


def passes(error: BaseException | None) -> bool:
    """Whether doing the same again may go well: the line broke, nobody listens, or the server is overloaded."""
    return any(_broke(one) or status_of(one) in PASSING for one in causes(error))


def _broke(error: Exception) -> bool:
    kind = type(error)
    httpx = kind.__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")
    return isinstance(error, ConnectionError) or (httpx and kind.__name__ in BROKEN)


def causes(error: BaseException | None) -> list[Exception]:
    """The error and what lies behind it, nearest first."""
    waiting: list[Any] = [error]
    seen: list[Exception] = []
    while waiting and len(seen) < DEPTH:
        one = waiting.pop(0)
        if not isinstance(one, Exception) or any(one is other for other in seen):
            continue
        seen.append(one)
        waiting += [one.__cause__, one.__context__, getattr(one, "reason", None), getattr(one, "os_error", None)]
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting += [part for part in one.args if isinstance(part, BaseException)]
    return seen


def out_of_space(error: BaseException | None) -> str | None:
    """Return the message of the error in a chain that says that a disk is full or a file may not grow; None without
    one. Libraries in other languages (safetensors, sqlite) wrap it in errors of their own, where only the text says
    so."""
    for cause in causes(error):
        if (isinstance(cause, OSError) and cause.errno in FULL_ERRNOS) or FULL.search(str(cause)):
            return str(cause)
    return None


def status_of(error: Exception) -> int | None:
    """That of the answer that an error of an HTTP client stands for (requests, httpx, aiohttp, urllib)."""
    response = getattr(error, "response", None)
    for holder, name in ((response, "status_code"), (error, "status_code"), (error, "status"), (error, "code")):
        if isinstance(found := getattr(holder, name, None), int):
            return found
    return None
