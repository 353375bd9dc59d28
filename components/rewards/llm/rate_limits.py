"""Limits by the minute: of requests, and of tokens.

A bucket holds a tenth of what a minute allows, and fills evenly with the rest of it in every minute: whoever takes more
than is there waits. So no minute sees more than its limit, requests do not come in bursts, and nine tenths of the limit
can be used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BURST_SHARE = 0.1
"""Of a minute's limit, that may be taken at once; at least one request, and of the smallest limits a half."""
POLL_SECONDS = 0.2
"""Seconds after which it is looked again: answers may have needed fewer tokens than were taken for them."""
CHARACTERS_PER_TOKEN = 4
"""For a first guess."""


class TokenBucket:
    """Filled evenly."""

    def __init__(self, per_minute: float):
        self._most = min(max(per_minute * BURST_SHARE, 1.0), per_minute / 2)
        self._rate = (per_minute - self._most) / 60
        self._level = self._most
        self._when = time.monotonic()

    def lacking(self, amount: float) -> float:
        """Seconds until it may be taken. What is more than there ever is may be taken from a full bucket, which is in
        debt then."""
        now = time.monotonic()
        self._level = min(self._most, self._level + (now - self._when) * self._rate)
        self._when = now
        return max(min(amount, self._most) - self._level, 0.0) / self._rate

    def take(self, amount: float) -> None:
        self._level -= amount

    def give_back(self, amount: float) -> None:
        """Of what was taken, this was not used; negative where more was used than was taken."""
        self._level += amount


class TokenEstimate:
    """How many tokens a question needs, by those before it. most: that an answer may have; so many are expected of the
    first."""

    def __init__(self, most: int):
        self._most = most
        self._characters, self._read = float(CHARACTERS_PER_TOKEN), 1.0
        self._answers, self._written = 0, 0

    def read(self, characters: int) -> float:
        return characters * self._read / self._characters

    def written(self) -> float:
        return self._written / self._answers if self._answers else float(self._most)

    def learn(self, characters: int, read: int, written: int) -> None:
        self._characters += characters
        self._read += read
        self._answers += 1
        self._written += written


class RateLimits:
    """None is no limit."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None):
        self._requests = TokenBucket(requests_per_minute) if requests_per_minute else None
        self._tokens = TokenBucket(tokens_per_minute) if tokens_per_minute else None
        self._turn = asyncio.Lock()

    async def wait(self, tokens: Callable[[], float]) -> float:
        """Until a request may be sent, one after the other. tokens: that it may need, as far as is known by now.
        Returns how many were taken for it."""
        if self._requests is None and self._tokens is None:
            return 0.0
        async with self._turn:
            while True:
                expected = tokens()
                seconds = self._requests.lacking(1) if self._requests else 0.0
                seconds = max(seconds, self._tokens.lacking(expected) if self._tokens else 0.0)
                if seconds <= 0:
                    break
                await asyncio.sleep(min(seconds, POLL_SECONDS))
            if self._requests:
                self._requests.take(1)
            if self._tokens:
                self._tokens.take(expected)
            return expected

    def used(self, expected: float, tokens: float) -> None:
        """A request for which `expected` tokens were taken needed so many."""
        if self._tokens:
            self._tokens.give_back(expected - tokens)
