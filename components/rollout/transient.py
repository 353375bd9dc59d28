"""What of an environment's errors may be gone the next time: the line broke, nobody listens, the server is overloaded.

Libraries say it in their own ways, so the whole chain of causes is looked at: a ConnectionError anywhere (httpx,
aiohttp, urllib, gRPC's Python wrappers and requests have one at the bottom), or a status of HTTP that passes.
"""

from __future__ import annotations

from typing import Any

PASSING = (429, 502, 503, 504)
"""Statuses of HTTP: too many requests, bad gateway, unavailable, gateway timeout."""
DEPTH = 16
"""Errors of a chain that are looked at."""


def passes(error: BaseException | None) -> bool:
    """Whether doing the same again may go well."""
    waiting: list[Any] = [error]
    seen: list[Any] = []
    while waiting and len(seen) < DEPTH:
        one = waiting.pop(0)
        if not isinstance(one, Exception) or any(one is other for other in seen):
            continue
        seen.append(one)
        if isinstance(one, ConnectionError) or _status(one) in PASSING:
            return True
        waiting += [one.__cause__, one.__context__, getattr(one, "reason", None), getattr(one, "os_error", None)]
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting += [part for part in one.args if isinstance(part, BaseException)]
    return False


def _status(error: BaseException) -> Any:
    """Of the answer that an error of an HTTP client stands for (requests, httpx, aiohttp, urllib)."""
    response = getattr(error, "response", None)
    for holder, name in ((response, "status_code"), (error, "status_code"), (error, "status"), (error, "code")):
        if isinstance(found := getattr(holder, name, None), int):
            return found
    return None
