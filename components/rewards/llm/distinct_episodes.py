"""The episodes of a group as judges are shown them: each different one once, in an order that a seed shuffles.

Each has an id that says nothing. What all of them begin with is a context of its own, shown once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from components.rewards.llm.transcript import as_text, common_start, shown
from components.trajectories.schema import Trajectory


class DistinctEpisodes:
    """Each episode has a place: of those that say the same, that of the first one."""

    def __init__(self, group: Sequence[Trajectory], seed: int):
        self._said = [shown(one) for one in group]
        self._start = common_start([one[0] for one in self._said]) if len(group) > 1 and all(self._said) else 0
        self._texts = [as_text(self._rest(place)) for place in range(len(group))]
        first: dict[str, int] = {}
        for place, text in enumerate(self._texts):
            first.setdefault(text, place)
        self.place = [first[text] for text in self._texts]
        """Of each episode, the one that stands for it."""
        self.context = as_text(self._said[0][0][: self._start]) if self._start else ""
        start = hashlib.sha256(f"{seed}\n{self.context}\n".encode())
        digests = {place: _digest(start, text) for text, place in first.items()}
        self.order = sorted(digests, key=digests.__getitem__)
        self.names = _names(digests)
        tools = [one.tools for one in group]
        self.tools = as_text(tools[0]) if tools[0] and all(one == tools[0] for one in tools) else ""

    def shown(self, parts: Sequence[tuple[str, int]], room: int) -> str:
        """Tools, context, and the episodes of these names and places, each in at most `room` characters."""
        text = [f"<tools>\n{self.tools}\n</tools>"] if self.tools else []
        text += [f"<context>\n{self.context}\n</context>"] if self.context else []
        text += [f'<trajectory id="{name}">\n{self.text(place, room)}\n</trajectory>' for name, place in parts]
        return "\n\n".join(text)

    def _rest(self, place: int) -> list[Any]:
        """What of an episode is not in the context. Of a single history, its messages alone."""
        first, *others = self._said[place] or [[]]
        rest = first[self._start :]
        return [rest, *others] if others else rest

    def text(self, place: int, longest: int | None = None) -> str:
        """What of an episode is not in the context."""
        text = self._texts[place]
        return text if longest is None or len(text) <= longest else as_text(self._rest(place), longest)


def _digest(start: Any, text: str) -> str:
    """Of a text after what `start` has read."""
    digest = start.copy()
    digest.update(text.encode())
    return digest.hexdigest()


def _names(digests: Mapping[int, str]) -> dict[int, str]:
    """Short names that differ."""
    for length in range(4, 65):
        names = {place: digest[:length] for place, digest in digests.items()}
        if len(set(names.values())) == len(names):
            return names
    raise AssertionError("equal episodes have one place")
