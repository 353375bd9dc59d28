"""Jaccard similarity of texts, and a search for a stored text that is similar to a new one.

    J(a, b) = |a ∩ b| / |a ∪ b|        of the sets of shingles: every run of w words (Broder, 1997)

The search is exact. Prefix filtering avoids most comparisons (Chaudhuri, Ganti, Kaushik, ICDE 2006): if J(a, b) >= t,
the two share at least ⌈t·|a|⌉ and at least ⌈t·|b|⌉ shingles. So in any fixed order of shingles, the first shared one is
among the first |a| - ⌈t·|a|⌉ + 1 of a, and among the first |b| - ⌈t·|b|⌉ + 1 of b. Only texts that share a shingle in
these prefixes are compared. Shingles are ordered by their 64-bit digests.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict

_WORD = re.compile(r"\w+")


def shingles(text: str, words: int) -> frozenset[int]:
    """Return 64-bit digests of every run of `words` words, ignoring case and punctuation.

    A shorter text has one shingle of all its words; a text without words has none.
    """
    all_words = _WORD.findall(text.lower())
    runs = (
        {" ".join(all_words[start : start + words]) for start in range(max(1, len(all_words) - words + 1))}
        if all_words
        else ()
    )
    return frozenset(map(_digest, runs))


def jaccard(first: frozenset[int], second: frozenset[int]) -> float:
    """Return the Jaccard similarity, 0 to 1. It is 0 if both sets are empty: texts without words are not comparable."""
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared) if shared else 0.0


class SimilarityIndex:
    """Index of the `capacity` texts that were added last."""

    def __init__(self, similarity: float, capacity: int):
        self.similarity = similarity
        self.capacity = capacity
        self._texts: dict[int, frozenset[int]] = {}
        self._numbers_by_shingle: defaultdict[int, set[int]] = defaultdict(set)
        """Numbers of the texts whose prefix contains the shingle, by shingle."""
        self._added = 0

    def has_similar(self, text: frozenset[int]) -> bool:
        """Return True if the similarity of `text` to an indexed text reaches the threshold."""
        near = {number for shingle in self._prefix(text) for number in self._numbers_by_shingle.get(shingle, ())}
        return any(jaccard(text, self._texts[number]) >= self.similarity for number in near)

    def add(self, text: frozenset[int]) -> None:
        """Add a text. Remove the oldest one if there are more than `capacity`."""
        self._texts[self._added] = text
        for shingle in self._prefix(text):
            self._numbers_by_shingle[shingle].add(self._added)
        self._added += 1
        if len(self._texts) > self.capacity:
            self._remove(next(iter(self._texts)))

    def _remove(self, number: int) -> None:
        for shingle in self._prefix(self._texts.pop(number)):
            self._numbers_by_shingle[shingle].discard(number)
            if not self._numbers_by_shingle[shingle]:
                del self._numbers_by_shingle[shingle]

    def _prefix(self, text: frozenset[int]) -> list[int]:
        shared = math.ceil(self.similarity * len(text) - 1e-9)  # rounding may lengthen the prefix, never shorten it
        return sorted(text)[: len(text) - shared + 1]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
