"""Pairings: all pairs, or a few rounds in which each player meets one more opponent.

    random     opponents not met yet, drawn with a seed
    swiss      opponents with a similar score, not met yet: close comparisons are the most informative

With an odd number of players, one sits out each round; in a Swiss round, the last of those who have sat out least.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import count

Pair = tuple[int, int]
MOST_TRIES = 2000
"""Maximum number of pairs tried in the search for a complete matching."""


def all_pairs(players: Sequence[int]) -> list[Pair]:
    """Return all pairs of players."""
    return [(player, other) for i, player in enumerate(players) for other in players[i + 1 :]]


def random_rounds(players: Sequence[int], rounds: int, seed: int) -> list[Pair]:
    """Return the pairs of all rounds."""
    generator = random.Random(seed)
    met: set[frozenset[int]] = set()
    for _ in range(rounds):
        order = list(players)
        generator.shuffle(order)
        met |= set(map(frozenset, _pair_neighbours(order, met)))
    return [pair for pair in all_pairs(players) if frozenset(pair) in met]


def swiss_round(players: Sequence[int], points: Sequence[float], met: Collection[frozenset[int]]) -> list[Pair]:
    """Return the pairs of the next round. players: in the order that breaks ties; points: their points so far."""
    games = Counter(player for pair in met for player in pair)
    total = dict(zip(players, points, strict=True))
    order = sorted(players, key=lambda player: -total[player])
    if len(order) % 2:
        most = max(games[player] for player in order)
        order.remove(next(player for player in reversed(order) if games[player] == most))
    return _pair_neighbours(order, met)


def _pair_neighbours(order: Sequence[int], met: Collection[frozenset[int]]) -> list[Pair]:
    """Return pairs of neighbours that have not met; as many pairs as possible, so that a player sits out only if
    necessary."""
    tries = count()
    return _complete_matching(list(order), met, tries) or _greedy_matching(order, met)


def _complete_matching(players: list[int], met: Collection[frozenset[int]], tries: Iterator[int]) -> list[Pair] | None:
    """Return a complete matching, without the last player if the number is odd; None if none was found within the
    limit."""
    if len(players) < 2:
        return []
    player, *others = players
    for other in others:
        if frozenset((player, other)) not in met and next(tries) < MOST_TRIES:
            pairs = _complete_matching([candidate for candidate in others if candidate != other], met, tries)
            if pairs is not None:
                return [(player, other), *pairs]
    return None


def _greedy_matching(order: Sequence[int], met: Collection[frozenset[int]]) -> list[Pair]:
    """Pair each player with the next available one; a player without a partner sits out."""
    players = list(order)
    pairs: list[Pair] = []
    while players:
        current = players.pop(0)
        other = next((player for player in players if frozenset((current, player)) not in met), None)
        if other is not None:
            players.remove(other)
            pairs.append((current, other))
    return pairs
