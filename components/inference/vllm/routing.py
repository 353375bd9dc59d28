"""Which of several servers answers: the one with the fewest requests under way; the turns of a conversation go where
its last answer came from, which still holds their keys and values."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable

REMEMBERED = 65536
"""Conversations whose server is known."""
AWAY = 60.0
"""Seconds in which a server that failed is asked nothing, where there are others."""


class Router:
    def __init__(self, count: int):
        self.under_way = [0] * count
        """Requests to each server."""
        self._away_until = [0.0] * count
        self._places: OrderedDict[Hashable, int] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, conversation: Hashable = None) -> int:
        """The server for a request, which counts as under way until `release`. conversation: which it continues; None
        where it continues none."""
        with self._lock:
            now = time.monotonic()
            there = [place for place, until in enumerate(self._away_until) if until <= now]
            known = self._places.get(conversation)
            place = known if known in there else None
            if place is None:
                place = min(there or range(len(self.under_way)), key=lambda one: (self.under_way[one], one))
            self.under_way[place] += 1
            return place

    def release(self, place: int) -> None:
        with self._lock:
            self.under_way[place] -= 1

    def answered(self, conversation: Hashable, place: int) -> None:
        """The conversation is held there now."""
        with self._lock:
            self._places[conversation] = place
            self._places.move_to_end(conversation)
            while len(self._places) > REMEMBERED:
                self._places.popitem(last=False)

    def failed(self, place: int) -> bool:
        """Asks it nothing for a while; whether there is another one that can be asked."""
        with self._lock:
            now = time.monotonic()
            self._away_until[place] = now + AWAY
            return any(until <= now for until in self._away_until)
