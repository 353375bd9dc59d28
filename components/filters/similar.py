"""How alike two texts are, and which of many texts is like a new one.

    J(a, b) = |a ∩ b| / |a ∪ b|        of the sets of shingles: every run of w words (Broder, 1997)

Nothing is estimated. That a new text need not be compared with all others follows from the measure (prefix filtering:
Chaudhuri, Ganti, Kaushik, ICDE 2006): where J(a, b) >= t, the two share at least ⌈t·|a|⌉ shingles, and as many as
⌈t·|b|⌉. So in any fixed order of shingles, the first one that they share is among the first |a| - ⌈t·|a|⌉ + 1 of a, and
among as many of b. Only texts that share one there are compared. The order is that of 64-bit digests.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict

_WORD = re.compile(r"\w+")


def shingles(text: str, words: int) -> frozenset[int]:
    """64-bit digests of every run of so many words, case and punctuation aside; of a shorter text one, of all its
    words; none where it has no word."""
    found = _WORD.findall(text.lower())
    runs = {" ".join(found[start : start + words]) for start in range(max(1, len(found) - words + 1))} if found else ()
    return frozenset(map(_digest, runs))


def jaccard(one: frozenset[int], other: frozenset[int]) -> float:
    """0 to 1; 0 where both are empty: of texts without a word nothing is known."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared) if shared else 0.0


class Texts:
    """Texts to which new ones are compared: those that were added last, at most so many."""

    def __init__(self, similarity: float, most: int):
        self.similarity = similarity
        self.most = most
        self._texts: dict[int, frozenset[int]] = {}
        self._with: defaultdict[int, set[int]] = defaultdict(set)
        """By shingle: the texts that have it among their first ones."""
        self._added = 0

    def like(self, text: frozenset[int]) -> bool:
        """Whether one of them is at least so similar."""
        near = {number for shingle in self._first(text) for number in self._with.get(shingle, ())}
        return any(jaccard(text, self._texts[number]) >= self.similarity for number in near)

    def add(self, text: frozenset[int]) -> None:
        """The oldest one is forgotten where there are too many."""
        self._texts[self._added] = text
        for shingle in self._first(text):
            self._with[shingle].add(self._added)
        self._added += 1
        if len(self._texts) > self.most:
            self._forget(next(iter(self._texts)))

    def _forget(self, number: int) -> None:
        for shingle in self._first(self._texts.pop(number)):
            self._with[shingle].discard(number)
            if not self._with[shingle]:
                del self._with[shingle]

    def _first(self, text: frozenset[int]) -> list[int]:
        shared = math.ceil(self.similarity * len(text) - 1e-9)  # rounding may lengthen the prefix, never shorten it
        return sorted(text)[: len(text) - shared + 1]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
