"""Episodes of a group as judges see them: duplicates once, in an order shuffled by a seed.

Each episode has a meaningless id. The common beginning of all episodes is the context, shown once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from components.rewards.llm.transcript import as_text, common_start, message_views
from components.trajectories.schema import Trajectory


class DistinctEpisodes:
    """Group with duplicates merged: each episode has a place, and duplicates share the place of the first one."""

    def __init__(self, group: Sequence[Trajectory], seed: int):
        self._histories = [message_views(trajectory) for trajectory in group]
        self._start = (
            common_start([histories[0] for histories in self._histories])
            if len(group) > 1 and all(self._histories)
            else 0
        )
        self._texts = [as_text(self._remainder(place)) for place in range(len(group))]
        first: dict[str, int] = {}
        for place, text in enumerate(self._texts):
            first.setdefault(text, place)
        self.place = [first[text] for text in self._texts]
        """Place of each episode: the index of the first episode with the same text."""
        self.context = as_text(self._histories[0][0][: self._start]) if self._start else ""
        start = hashlib.sha256(f"{seed}\n{self.context}\n".encode())
        digests = {place: _digest(start, text) for text, place in first.items()}
        self.order = sorted(digests, key=digests.__getitem__)
        self.names = _names(digests)
        tools = [trajectory.tools for trajectory in group]
        self.tools = as_text(tools[0]) if tools[0] and all(specs == tools[0] for specs in tools) else ""

    def render(self, parts: Sequence[tuple[str, int]], room: int) -> str:
        """Return the text of the tools, the context, and the episodes with these names and places, each in at most
        `room` characters."""
        text = [f"<tools>\n{self.tools}\n</tools>"] if self.tools else []
        text += [f"<context>\n{self.context}\n</context>"] if self.context else []
        text += [f'<trajectory id="{name}">\n{self.text(place, room)}\n</trajectory>' for name, place in parts]
        return "\n\n".join(text)

    def _remainder(self, place: int) -> list[Any]:
        """Return the part of an episode after the context; for a single history, its messages alone."""
        first, *others = self._histories[place] or [[]]
        remainder = first[self._start :]
        return [remainder, *others] if others else remainder

    def text(self, place: int, longest: int | None = None) -> str:
        """Return the text of an episode after the context, cut to `longest` characters."""
        text = self._texts[place]
        return text if longest is None or len(text) <= longest else as_text(self._remainder(place), longest)


def _digest(start: Any, text: str) -> str:
    """Return the digest of a text appended to what `start` has hashed."""
    digest = start.copy()
    digest.update(text.encode())
    return digest.hexdigest()


def _names(digests: Mapping[int, str]) -> dict[int, str]:
    """Return unique short names: prefixes of the digests."""
    for length in range(4, 65):
        names = {place: digest[:length] for place, digest in digests.items()}
        if len(set(names.values())) == len(names):
            return names
    raise AssertionError("equal episodes must share one place")
