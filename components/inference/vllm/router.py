"""Assignment of requests to the servers of one model."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable

REMEMBERED = 65536
"""Maximum number of conversations with a cached server."""
UNAVAILABLE_SECONDS = 60.0
"""Seconds during which a failed server gets no requests if other servers are available."""


class Router:
    """Assignment of requests to servers, by index."""

    def __init__(self, count: int):
        self.under_way = [0] * count
        """Number of requests in flight per server."""
        self._unavailable_until = [0.0] * count
        self._places: OrderedDict[Hashable, int] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, conversation: Hashable = None) -> int:
        """Return the server of a request, which is in flight until `release`. conversation: key of the conversation
        that the request continues, or None."""
        with self._lock:
            now = time.monotonic()
            available = [place for place, until in enumerate(self._unavailable_until) if until <= now]
            cached = self._places.get(conversation)
            place = cached if cached in available else None
            if place is None:
                candidates = available or range(len(self.under_way))
                place = min(candidates, key=lambda candidate: (self.under_way[candidate], candidate))
            self.under_way[place] += 1
            return place

    def release(self, place: int) -> None:
        """End a request in flight."""
        with self._lock:
            self.under_way[place] -= 1

    def record_response(self, conversation: Hashable, place: int) -> None:
        """Record the server of a conversation's last response."""
        with self._lock:
            self._places[conversation] = place
            self._places.move_to_end(conversation)
            while len(self._places) > REMEMBERED:
                self._places.popitem(last=False)

    def failed(self, place: int) -> bool:
        """Exclude a failed server for a while. Return True if another server is available."""
        with self._lock:
            now = time.monotonic()
            self._unavailable_until[place] = now + UNAVAILABLE_SECONDS
            return any(until <= now for until in self._unavailable_until)
