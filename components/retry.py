"""Retries: exponential backoff within a total time or a number of retries, and patience with a server at first contact.

The time counts from the first failure, because a single attempt, such as a large upload or a slow answer, may take
longer than all pauses together.

A refused connection or an unknown host at a server that has not answered this process yet is more likely a wrong
address than an outage, so it is not retried unless `wait_for` says so.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from components.errors import ResourceError
from components.json_reply import FailedAttempt

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds before the first retry, and at most; up to half is subtracted at random, so that clients do not return
together."""


class Backoff:
    """Pauses of one operation, which is retried for `seconds` and at most `retries` times. first, longest: seconds
    before the first retry, and at most; None: `FIRST_PAUSE` and `LONGEST_PAUSE`."""

    def __init__(
        self,
        seconds: float = math.inf,
        *,
        retries: float = math.inf,
        first: float | None = None,
        longest: float | None = None,
    ):
        self.failures = 0
        self._seconds = seconds
        self._retries = retries
        self._deadline = 0.0
        self._pause = FIRST_PAUSE if first is None else first
        self._longest = LONGEST_PAUSE if longest is None else longest

    def pause(self, retry_after: float | None = None) -> float | None:
        """Return the seconds before the next attempt, after a failure; None if the time is over or no retry is left.
        retry_after: delay that the server asks for, which takes precedence; up to a quarter is added at random."""
        now = time.monotonic()
        if not self.failures:
            self._deadline = now + self._seconds
        self.failures += 1
        pause = (
            random.uniform(0.5, 1.0) * self._pause if retry_after is None else random.uniform(1.0, 1.25) * retry_after
        )
        self._pause = min(2 * self._pause, self._longest)
        return pause if now + pause <= self._deadline and self.failures <= self._retries else None


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
