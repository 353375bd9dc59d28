"""Limits by the minute: of requests, and of tokens.

A bucket holds what a tenth of a minute allows, and fills evenly: whoever takes more than is there waits. So no minute
sees more than its limit and a tenth, and requests do not come in bursts.
"""

from __future__ import annotations

import asyncio
import time

BURST = 6.0
"""Seconds' worth that may be taken at once."""


class Bucket:
    """Filled evenly."""

    def __init__(self, per_minute: float):
        self._rate = per_minute / 60
        self._most = max(self._rate * BURST, 1.0)
        self._level = self._most
        self._when = time.monotonic()

    def take(self, amount: float) -> float:
        """Takes it, and says how many seconds to wait before it is used. What is taken may be more than there ever is:
        then the bucket is in debt."""
        now = time.monotonic()
        self._level = min(self._most, self._level + (now - self._when) * self._rate)
        self._when = now
        self._level -= amount
        return max(-self._level / self._rate, 0.0)

    def give_back(self, amount: float) -> None:
        """Of what was taken, this was not used; negative where more was used than was taken."""
        self._level += amount


class Limits:
    """None is no limit."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None):
        self._requests = Bucket(requests_per_minute) if requests_per_minute else None
        self._tokens = Bucket(tokens_per_minute) if tokens_per_minute else None

    async def wait(self, tokens: float) -> None:
        """Until a request of about so many tokens may be sent."""
        waits = [self._requests.take(1)] if self._requests else []
        waits += [self._tokens.take(tokens)] if self._tokens else []
        if waits and max(waits) > 0:
            await asyncio.sleep(max(waits))

    def used(self, expected: float, tokens: float) -> None:
        """A request for which `expected` tokens were taken needed so many."""
        if self._tokens:
            self._tokens.give_back(expected - tokens)
