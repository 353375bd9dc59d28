"""Delta debugging: a minimal set of changes that reproduces a difference.

ddmin of Zeller and Hildebrandt 2002 (IEEE Transactions on Software Engineering 28(2):183, figure 6): test subsets of
the changes, then their complements, then divide more finely. Few changes are tested one at a time, in their order; many
are split in two first. The result is minimal: without any of its changes the difference is not reproduced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

FEW = 4
"""Maximum number of changes that are tested one at a time from the start."""


def minimal_changes(changes: Sequence[T], reproduces: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a minimal subset of changes that reproduces the difference, in the given order. changes: a set that
    reproduces it. reproduces: test of a subset; not called for all changes, nor twice for the same subset."""
    outcomes: dict[tuple[int, ...], bool] = {tuple(range(len(changes))): True}

    def fails(indices: tuple[int, ...]) -> bool:
        if indices not in outcomes:
            outcomes[indices] = reproduces([changes[index] for index in indices])
        return outcomes[indices]

    current = tuple(range(len(changes)))
    parts = _first_granularity(current)
    while len(current) > 1:
        subsets = _split(current, parts)
        if (subset := next((subset for subset in subsets if fails(subset)), None)) is not None:
            current, parts = subset, _first_granularity(subset)
            continue
        complements = [tuple(index for index in current if index not in subset) for subset in subsets]
        if parts > 2 and (smaller := next((part for part in complements if fails(part)), None)) is not None:
            current, parts = smaller, max(parts - 1, 2)
        elif parts < len(current):
            parts = min(len(current), 2 * parts)
        else:
            break
    return [changes[index] for index in current]


def _first_granularity(indices: Sequence[int]) -> int:
    return len(indices) if len(indices) <= FEW else 2


def _split(indices: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Return the indices in this number of parts of similar size."""
    ends = [len(indices) * part // parts for part in range(parts + 1)]
    return [indices[start:end] for start, end in itertools.pairwise(ends)]
