"""Rate limits per minute: of requests, and of tokens.

A token bucket holds a tenth of the limit, and refills evenly with the other nine tenths every minute; a request that
needs more than the bucket holds waits. So no minute exceeds its limit, requests do not come in bursts, and at least
nine tenths of the limit can be used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BURST_SHARE = 0.1
"""Share of the limit per minute that may be taken at once; at least one request, and for the smallest limits a half."""
POLL_SECONDS = 0.2
"""Polling interval in seconds: answers may return tokens that they did not need."""
CHARACTERS_PER_TOKEN = 4
"""Initial estimate of characters per token."""


class TokenBucket:
    """Token bucket with a constant refill rate."""

    def __init__(self, per_minute: float):
        self._capacity = min(max(per_minute * BURST_SHARE, 1.0), per_minute / 2)
        self._rate = (per_minute - self._capacity) / 60
        self._level = self._capacity
        self._updated = time.monotonic()

    def lacking(self, amount: float) -> float:
        """Return the seconds until `amount` may be taken. An amount above the capacity may be taken from a full bucket,
        whose level then becomes negative."""
        now = time.monotonic()
        self._level = min(self._capacity, self._level + (now - self._updated) * self._rate)
        self._updated = now
        return max(min(amount, self._capacity) - self._level, 0.0) / self._rate

    def take(self, amount: float) -> None:
        """Remove an amount from the bucket."""
        self._level -= amount

    def give_back(self, amount: float) -> None:
        """Return an amount that was taken and not used; negative if more was used than taken."""
        self._level += amount


class TokenEstimate:
    """Estimate of the tokens that a question needs, from earlier ones. most: token limit of an answer, the estimate for
    the first one."""

    def __init__(self, most: int):
        self._max_tokens = most
        self._characters, self._read = float(CHARACTERS_PER_TOKEN), 1.0
        self._count, self._written = 0, 0

    def read(self, characters: int) -> float:
        """Return the expected prompt tokens of a text with this many characters."""
        return characters * self._read / self._characters

    def written(self) -> float:
        """Return the expected completion tokens."""
        return self._written / self._count if self._count else float(self._max_tokens)

    def learn(self, characters: int, read: int, written: int) -> None:
        """Update the estimate with the prompt and completion tokens of an answer."""
        self._characters += characters
        self._read += read
        self._count += 1
        self._written += written


class RateLimits:
    """Rate limits of one model; None is no limit."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None):
        self._requests = TokenBucket(requests_per_minute) if requests_per_minute else None
        self._tokens = TokenBucket(tokens_per_minute) if tokens_per_minute else None
        self._lock = asyncio.Lock()

    async def wait(self, estimate: Callable[[], float]) -> float:
        """Wait until a request may be sent, one request at a time, and return the tokens taken for it. estimate:
        returns the current estimate of the tokens that it needs."""
        if self._requests is None and self._tokens is None:
            return 0.0
        async with self._lock:
            while True:
                expected_tokens = estimate()
                seconds = self._requests.lacking(1) if self._requests else 0.0
                seconds = max(seconds, self._tokens.lacking(expected_tokens) if self._tokens else 0.0)
                if seconds <= 0:
                    break
                await asyncio.sleep(min(seconds, POLL_SECONDS))
            if self._requests:
                self._requests.take(1)
            if self._tokens:
                self._tokens.take(expected_tokens)
            return expected_tokens

    def used(self, expected: float, tokens: float) -> None:
        """Correct the bucket: a request for which `expected` tokens were taken needed `tokens`."""
        if self._tokens:
            self._tokens.give_back(expected - tokens)
