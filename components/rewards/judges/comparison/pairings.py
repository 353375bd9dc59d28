"""Who is compared with whom: everybody with everybody, or a few rounds in which each meets one more.

    random     who has not met yet, drawn by a seed
    swiss      who has about as many points, of those who have not met yet: close calls tell most

Where the number is odd, one sits out each round; in a Swiss round the last one who has done so the least.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import count

Pair = tuple[int, int]
MOST_TRIES = 2000
"""Pairs that are tried to find everybody a partner."""


def all_pairs(players: Sequence[int]) -> list[Pair]:
    return [(one, other) for i, one in enumerate(players) for other in players[i + 1 :]]


def random_rounds(players: Sequence[int], rounds: int, seed: int) -> list[Pair]:
    """The pairs of all rounds."""
    drawn = random.Random(seed)
    met: set[frozenset[int]] = set()
    for _ in range(rounds):
        order = list(players)
        drawn.shuffle(order)
        met |= set(map(frozenset, _paired(order, met)))
    return [pair for pair in all_pairs(players) if frozenset(pair) in met]


def swiss_round(players: Sequence[int], points: Sequence[float], met: Collection[frozenset[int]]) -> list[Pair]:
    """The pairs of the next round. players: in an order that decides between equals; points: of each of them so far."""
    games = Counter(player for pair in met for player in pair)
    total = dict(zip(players, points, strict=True))
    order = sorted(players, key=lambda player: -total[player])
    if len(order) % 2:
        most = max(games[player] for player in order)
        order.remove(next(player for player in reversed(order) if games[player] == most))
    return _paired(order, met)


def _paired(order: Sequence[int], met: Collection[frozenset[int]]) -> list[Pair]:
    """Neighbours, as far as they have not met; as many as can be, so that nobody sits out who need not."""
    tries = count()
    return _matched(list(order), met, tries) or _nearest(order, met)


def _matched(left: list[int], met: Collection[frozenset[int]], tries: Iterator[int]) -> list[Pair] | None:
    """All of them in pairs, the last one alone where the number is odd; None where that was not found."""
    if len(left) < 2:
        return []
    one, *others = left
    for other in others:
        if frozenset((one, other)) not in met and next(tries) < MOST_TRIES:
            rest = _matched([player for player in others if player != other], met, tries)
            if rest is not None:
                return [(one, other), *rest]
    return None


def _nearest(order: Sequence[int], met: Collection[frozenset[int]]) -> list[Pair]:
    """Each with the next that is left; who finds nobody sits out."""
    left = list(order)
    pairs: list[Pair] = []
    while left:
        one = left.pop(0)
        other = next((player for player in left if frozenset((one, player)) not in met), None)
        if other is not None:
            left.remove(other)
            pairs.append((one, other))
    return pairs
