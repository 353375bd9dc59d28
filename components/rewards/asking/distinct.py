"""The episodes of a group as judges are shown them: each different one once, in an order that a seed shuffles.

Each has an id that says nothing. What all of them begin with is a context of its own, shown once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from components.rewards.asking.transcript import as_text, common_start, shown
from components.trajectories.schema import Trajectory


class Distinct:
    """Each episode has a place: of those that say the same, that of the first one."""

    def __init__(self, group: Sequence[Trajectory], seed: int):
        said = [shown(one) for one in group]
        texts = [as_text(one) for one in said]
        first: dict[str, int] = {}
        for i, text in enumerate(texts):
            first.setdefault(text, i)
        self.place = [first[text] for text in texts]
        """Of each episode, the one that stands for it."""
        digests = {i: hashlib.sha256(f"{seed}\n{text}".encode()).hexdigest() for text, i in first.items()}
        self.order = sorted(digests, key=digests.__getitem__)
        self.names = _names(digests)
        self._said = said
        self._texts = texts
        tools = [one.tools for one in group]
        self.tools = as_text(tools[0]) if tools[0] and all(one == tools[0] for one in tools) else ""
        self._start = common_start([one[0] for one in said]) if len(self.order) > 1 and all(said) else 0
        self.context = as_text(said[0][0][: self._start]) if self._start else ""

    def rest(self, place: int, longest: int | None = None) -> str:
        """What of an episode is not in the context. Of a single history, its messages alone."""
        first, *others = self._said[place]
        rest: list[Any] = [first[self._start :], *others]
        if not self._start and longest is None:
            return self._texts[place]
        return as_text(rest[0] if len(rest) == 1 else rest, longest)

    def shown(self, parts: Sequence[tuple[str, int]], room: int) -> str:
        """Tools, context, and the episodes of these names and places, each in at most `room` characters."""
        text = [f"<tools>\n{self.tools}\n</tools>"] if self.tools else []
        text += [f"<context>\n{self.context}\n</context>"] if self.context else []
        text += [f'<trajectory id="{name}">\n{self.rest(place, room)}\n</trajectory>' for name, place in parts]
        return "\n\n".join(text)


def _names(digests: Mapping[int, str]) -> dict[int, str]:
    """Short names that differ."""
    for length in range(4, 65):
        names = {place: digest[:length] for place, digest in digests.items()}
        if len(set(names.values())) == len(names):
            return names
    raise AssertionError("equal episodes have one place")
