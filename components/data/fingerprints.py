"""Bounded memory of rows: fingerprints of equal rows, and the search for similar texts with MinHash.

Two texts are similar if they agree in one of BANDS bands of ROWS_PER_BAND minimal hashes of their character sequences
(MinHash with locality-sensitive hashing): texts that share 95 % of their sequences are detected with a probability of
0.95, texts that share 70 % with one of 0.05. Both memories have a fixed maximum size and forget rows beyond it, so in
larger data some repetitions go unnoticed.
"""

from __future__ import annotations

import hashlib
import re

import numpy as np

MOST_FINGERPRINTS = 5_000_000
"""Number of rows whose fingerprints are remembered, in 16 bytes each."""
MOST_LATEST = 2**16
"""Maximum number of fingerprints that are not sorted yet, of about 130 bytes each."""
SLOTS = 2**21
"""Slots of the table of a band, of 12 bytes each. A new entry replaces the old one of its slot."""
BANDS, ROWS_PER_BAND = 4, 12
WIDTH = 8
"""Length of a character sequence, in bytes."""
COMPARED = 10_000
"""Bytes at the beginning of a text that are compared."""
_SPACE = re.compile(r"\s+")


def fingerprint(content: bytes) -> int:
    """Return the 64-bit hash of a content; never 0."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1


class Fingerprints:
    """Row numbers by fingerprint: the latest in a dictionary, the others in sorted arrays. Each array is at least twice
    as long as the next, so there are few. An entry is forgotten after `most` further rows."""

    def __init__(self, most: int = MOST_FINGERPRINTS):
        self._most = most
        self._latest: dict[int, int] = {}
        self._sorted: list[tuple[np.ndarray, np.ndarray]] = []
        """Fingerprints in ascending order, with their row numbers."""
        self._number = 0

    def add(self, key: int, number: int) -> int | None:
        """Return the number that a fingerprint was added with before; None, after adding it, if it is new. Numbers
        ascend."""
        self._number = max(self._number, number)
        known = self.find(key)
        if known is None:
            self._latest[key] = number
            if len(self._latest) >= MOST_LATEST:
                self._sort_latest()
        return known

    def find(self, key: int) -> int | None:
        """Return the number that a fingerprint was added with; None if it was not added, or is forgotten."""
        number = self._latest.get(key, -1)
        for keys, numbers in self._sorted if number < 0 else ():
            place = int(keys.searchsorted(np.uint64(key)))
            if place < len(keys) and int(keys[place]) == key:
                number = max(number, int(numbers[place]))
        return number if number > max(-1, self._number - self._most) else None

    def _sort_latest(self) -> None:
        keys, numbers = (np.fromiter(values, np.uint64) for values in (self._latest, self._latest.values()))
        while self._sorted and len(self._sorted[-1][0]) < 2 * len(keys):
            longer = self._sorted.pop()
            keys, numbers = np.append(longer[0], keys), np.append(longer[1], numbers)
        remembered = numbers.astype(np.int64) > self._number - self._most
        order = keys[remembered].argsort()
        self._sorted.append((keys[remembered][order], numbers[remembered][order]))
        self._latest.clear()


class SimilarTexts:
    """Search for earlier texts that are similar to a new one."""

    def __init__(self, slots: int = SLOTS):
        self._keys = [np.zeros(slots, np.uint64) for _ in range(BANDS)]
        self._numbers = [np.zeros(slots, np.uint32) for _ in range(BANDS)]
        generator = np.random.Generator(np.random.PCG64(0))
        self._factors = generator.integers(0, 2**31, (BANDS * ROWS_PER_BAND, 1), dtype=np.uint32) * 2 + 1

    def add(self, text: str, number: int) -> int | None:
        """Add a text, and return the number of an earlier similar text; None if there is none."""
        minima = self._minima(text)
        similar = None
        for band, (keys, numbers) in enumerate(zip(self._keys, self._numbers, strict=True)):
            key = fingerprint(minima[band * ROWS_PER_BAND : (band + 1) * ROWS_PER_BAND].tobytes())
            slot = key % len(keys)
            if keys[slot] == key:
                similar = int(numbers[slot]) if similar is None else similar
            else:
                keys[slot], numbers[slot] = key, number
        return similar

    def _minima(self, text: str) -> np.ndarray:
        """Return the minimal value of each hash function over the character sequences of a text."""
        data = _SPACE.sub(" ", text.strip().lower()).encode(errors="surrogatepass")[:COMPARED].ljust(WIDTH)
        sequences = np.ndarray((len(data) - WIDTH + 1,), "<u8", data, strides=(1,))
        mixed = (sequences ^ (sequences >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashed = (mixed >> np.uint64(32)).astype(np.uint32)  # 32 bits: their product is vectorised
        return (hashed * self._factors).min(axis=1)
