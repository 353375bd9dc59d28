"""Retries of requests to a server that may be temporarily unavailable, and patience with one at first contact.

A refused connection or an unknown host at a server that has not answered this process yet is more likely a wrong
address than an outage, so it is not retried unless `wait_for` says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from components.errors import ResourceError
from components.json_reply import FailedAttempt
from components.retry import Backoff

EMPTY_ANSWERS = 3
"""Retries of an empty or invalid response. The server is up, so waiting longer does not help."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ClientTimeouts:
    """Timeouts of a client, and their key path."""

    timeout: float
    """Seconds for one response."""
    retry_for: float
    """Seconds for which a failed request is retried."""
    path: str
    """Key path of the section that holds these values, for messages."""
    wait_for: float | None = None
    """Seconds to wait for a server that has not answered yet; None: 0, and the section has no such key."""


_reached: set[str] = set()
"""Servers that have answered this process, in any stage."""


def record_contact(server: str) -> None:
    """Record that a server has answered: from now on it is retried when it is unreachable."""
    _reached.add(server)


async def retry_with_backoff(
    attempt: Callable[[], Awaitable[Answer]],
    patience: ClientTimeouts,
    server: str,
    on_retry: Callable[[FailedAttempt], object] = lambda error: None,
) -> Answer:
    """Return the result of `attempt`, which is retried while it raises FailedAttempt.

    server: name for `record_contact`, and for messages. `on_retry` is called with each failure that is followed by a
    retry. Raises the last one, with the number of attempts or the seconds of retrying, and ResourceError for a server
    that is unreachable and has never answered."""
    backoff, first_contact = Backoff(patience.retry_for), Backoff(patience.wait_for or 0.0)
    empty = 0
    while True:
        try:
            return await attempt()
        except FailedAttempt as error:
            unknown = error.unreachable and server not in _reached
            pause = (first_contact if unknown else backoff).pause(error.pause)
            if unknown and pause is None:
                raise ResourceError(_no_contact(server, error, patience)) from None
            empty = empty + 1 if error.empty else 0
            if empty >= EMPTY_ANSWERS:
                raise FailedAttempt(f"{error}, {empty} times in a row") from None
            if pause is None:
                raise FailedAttempt(
                    f"{error}; retried for {patience.retry_for:g} s ({patience.path}.retry_for)"
                ) from None
            on_retry(error)
        await asyncio.sleep(pause)


def _no_contact(server: str, error: FailedAttempt, patience: ClientTimeouts) -> str:
    waited = f" for {patience.wait_for:g} s" if patience.wait_for else ""
    wait = "" if patience.wait_for is None else f", or let the run wait for it with {patience.path}.wait_for=SECONDS"
    return f"{patience.path}: {server} is unreachable{waited}: {error}. Start the server, correct its address{wait}"
