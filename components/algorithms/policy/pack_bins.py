"""Distribution of sorted sequences over packs, by their lengths and the prefixes that neighbours share."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

Range = tuple[int, int, int]
"""Range of sorted sequences (first, end), and the number of nodes of their trie."""


def subtrees(lengths: Sequence[int], shared: Sequence[int], most_tokens: int) -> list[Range]:
    """Return the largest subtrees that fit into a pack. shared: common prefix length of each sorted sequence with the
    previous one."""
    subtrees, pending = [], [(0, len(lengths))] if lengths else []
    while pending:
        first, last = pending.pop()
        nodes = lengths[first] + sum(lengths[place] - shared[place] for place in range(first + 1, last))
        if nodes <= most_tokens or last == first + 1:
            subtrees.append((first, last, nodes))
            continue
        trunk = min(shared[first + 1 : last])
        cuts = [first, *(place for place in range(first + 1, last) if shared[place] == trunk), last]
        pending += pairwise(cuts)
    return subtrees


Bin = tuple[int, list[Range]]
"""Number of tokens that a pack computes, and its ranges."""


def fill(parts: list[Range], shared: Sequence[int], most_tokens: int) -> list[Bin]:
    """Assign subtrees to packs by best fit decreasing: the largest first, each to the pack where it adds the fewest
    nodes."""
    prefix_minimum = _RangeMinimum(shared)
    bins: list[list[Range]] = []  # each sorted by sequence, because a part shares the longest prefix with a neighbour
    sizes: list[int] = []
    for part in sorted(parts, key=lambda range_: (-range_[2], range_[0])):
        best: tuple[int, int, int] | None = None
        for index, parts_in_bin in enumerate(bins):
            position = bisect(parts_in_bin, part)
            shares = [
                prefix_minimum.between(*sorted((part, other)))
                for other in parts_in_bin[max(position - 1, 0) : position + 1]
            ]
            added = part[2] - max(shares)
            if sizes[index] + added <= most_tokens:
                best = min(best or (added, most_tokens, index), (added, most_tokens - sizes[index], index))
        if best is None:
            bins.append([part])
            sizes.append(part[2])
        else:
            insort(bins[best[2]], part)
            sizes[best[2]] += best[0]
    return list(zip(sizes, bins, strict=True))


def fill_rows(lengths: Sequence[int], shared: Sequence[int], most_tokens: int) -> list[Bin]:
    """Assign rows to packs, longest first; rows are padded to the longest of a pack. A row is a sequence and the
    preceding sequences that are prefixes of it."""
    ends = [
        place for place in range(1, len(lengths) + 1) if place == len(lengths) or shared[place] < lengths[place - 1]
    ]
    rows = [(first, last, lengths[last - 1]) for first, last in pairwise([0, *ends])]
    bins: list[list[Range]] = []
    for row in sorted(rows, key=lambda range_: (-range_[2], range_[0])):
        if bins and (len(bins[-1]) + 1) * bins[-1][0][2] <= most_tokens:
            bins[-1].append(row)
        else:
            bins.append([row])
    return [(len(rows_of_bin) * rows_of_bin[0][2], rows_of_bin) for rows_of_bin in bins]


class _RangeMinimum:
    """Minimum over any range of numbers in constant time (sparse table)."""

    def __init__(self, numbers: Sequence[int]):
        self._minima = [np.asarray(numbers)]  # [k][i]: minimum of the 2^k numbers from i on
        while len(self._minima[-1]) > (half := 2 ** (len(self._minima) - 1)):
            self._minima.append(np.minimum(self._minima[-1][:-half], self._minima[-1][half:]))

    def between(self, first: Range, second: Range) -> int:
        """Return the number of nodes that a subtree shares with a later one: the minimum of the prefix lengths that
        neighbours share, from the end of the first to the start of the second."""
        start, stop = first[1], second[0] + 1
        k = (stop - start).bit_length() - 1
        return int(min(self._minima[k][start], self._minima[k][stop - 2**k]))
