"""Pauses between the attempts of an operation: exponential backoff within a total time or a number of retries.

The time counts from the first failure, because a single attempt, such as a large upload or a slow answer, may take
longer than all pauses together.
"""

from __future__ import annotations

import math
import random
import time

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds before the first retry, and at most; up to half is subtracted at random, so that clients do not return
together."""


class Backoff:
    """Pauses of one operation, which is retried for `seconds` and at most `retries` times. first, longest: seconds
    before the first retry, and at most."""

    def __init__(
        self,
        seconds: float = math.inf,
        *,
        retries: float = math.inf,
        first: float = FIRST_PAUSE,
        longest: float = LONGEST_PAUSE,
    ):
        self.failures = 0
        self._seconds = seconds
        self._retries = retries
        self._deadline = 0.0
        self._pause = first
        self._longest = longest

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
