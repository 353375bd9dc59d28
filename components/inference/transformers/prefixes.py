"""Prefixes that the active sequences share, for `components.models.shared_attention`.

The sequences form a trie: all may share a system message, the episodes of a group their scenario. In lexicographic
order, the descendants of a node are adjacent, and what they share is what the first and the last of them share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from components.models.shared_attention import PrivateRun, Segment, Sharing

SHARED_TOKENS = 15_000
"""Least number of tokens that are not read because prefixes are shared: a fifth of a decoding pass of SmolLM2-135M with
64 rows. Below, attention reads every row by itself, and rounds as it does alone."""
SEGMENT_TOKENS = 2048
"""Least number of them for one segment: below, its own operations take longer."""
RUN_TOKENS = 512
"""Greatest number of masked tokens that are read to avoid one more run: they take as long as its operations."""


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection, because list comparison in C is faster than a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def partition(sequences: Sequence[list[int]], least: float = SHARED_TOKENS) -> Sharing | None:
    """Return the partition of sequences whose keys and values are cached, before a step that adds a token to each;
    None if it does not save reading `least` tokens."""
    if len(sequences) < 2:
        return None
    order = sorted(range(len(sequences)), key=lambda row: sequences[row])
    common = [shared_prefix(sequences[a], sequences[b]) for a, b in pairwise(order)]
    segments = tuple(_segments(order, common, 0, min(least, SEGMENT_TOKENS)))
    if sum((segment.stop - segment.start) * (len(segment.rows) - 1) for segment in segments) < max(least, 1):
        return None
    private = [0] * len(sequences)
    for segment in segments:
        for row in segment.rows:
            private[row] = segment.stop
    lengths = [len(sequence) + 1 for sequence in sequences]
    return Sharing(segments, tuple(private), tuple(_runs(private, lengths)))


def _segments(order: list[int], common: list[int], start: int, least: float) -> Iterator[Segment]:
    """Yield the segments below a node of the trie. common: shared tokens of each two adjacent sequences."""
    if not common:
        return
    stop = min(common)
    if (stop - start) * len(common) >= least:
        yield Segment(tuple(sorted(order)), start, stop)
        start = stop
    first = 0
    for last, count in enumerate([*common, stop], 1):
        if count == stop:  # a branch ends
            yield from _segments(order[first:last], common[first : last - 1], start, least)
            first = last


def _runs(starts: list[int], stops: list[int]) -> Iterator[PrivateRun]:
    """Yield the runs of rows with private tokens [start, stop)."""
    run = PrivateRun(0, 1, starts[0], stops[0])
    for row in range(1, len(starts)):
        count, start, stop = row - run.first, min(run.start, starts[row]), max(run.stop, stops[row])
        before = count * (run.stop - run.start) + stops[row] - starts[row]
        if (count + 1) * (stop - start) - before > RUN_TOKENS:
            yield run
            run = PrivateRun(row, row + 1, starts[row], stops[row])
        else:
            run = PrivateRun(run.first, row + 1, start, stop)
    yield run


def shares_tokens(a: list[int], b: list[int], count: int) -> bool:
    """Return True if the first `count` tokens are equal. The last one, which differs most often, is compared first."""
    return min(len(a), len(b)) >= count and a[count - 1] == b[count - 1] and a[:count] == b[:count]
