"""Pairings of players."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from components.rewards.judges.comparison.pairings import all_pairs, random_rounds, swiss_round


def games(pairs):
    return Counter(player for pair in pairs for player in pair)


def test_everybody_meets_everybody_once():
    assert all_pairs([3, 1, 2]) == [(3, 1), (3, 2), (1, 2)]


@given(st.integers(2, 15), st.integers(1, 6), st.integers(0, 99))
def test_random_rounds_pair_nobody_twice_and_nobody_too_often(players, rounds, seed):
    pairs = random_rounds(range(players), rounds, seed)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    assert all(player != other for player, other in pairs)
    assert max(games(pairs).values()) <= rounds
    assert pairs == random_rounds(range(players), rounds, seed)


def test_the_seed_draws_them():
    assert len({tuple(random_rounds(range(10), 2, seed)) for seed in range(5)}) == 5


def test_in_a_swiss_round_those_with_as_many_points_meet():
    met = {frozenset(pair) for pair in [(0, 1), (2, 3), (4, 5), (6, 7)]}
    points = [1, 0, 1, 0, 1, 0, 1, 0]
    assert swiss_round(range(8), points, met) == [(0, 2), (4, 6), (1, 3), (5, 7)]


@given(st.integers(2, 13), st.integers(1, 5), st.data())
def test_swiss_rounds_never_repeat_a_pair(players, rounds, data):
    met: set[frozenset[int]] = set()
    points = [0.0] * players
    for _ in range(rounds):
        pairs = swiss_round(range(players), points, met)
        assert max(games(pairs).values(), default=0) <= 1
        for player, other in pairs:
            assert frozenset((player, other)) not in met
            met.add(frozenset((player, other)))
            share = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
            points[player] += share
            points[other] += 1 - share


def test_of_an_odd_number_nobody_sits_out_twice_before_all_have(subtests):
    for players in [7, 9, 13]:
        with subtests.test(players=players):
            met: set[frozenset[int]] = set()
            out = []
            points = [0.0] * players
            for _ in range(3):
                pairs = swiss_round(range(players), points, met)
                met |= set(map(frozenset, pairs))
                for player, _other in pairs:
                    points[player] += 1
                rest = set(range(players)) - set(games(pairs))
                assert len(rest) == 1
                out.append(rest.pop())
            assert len(set(out)) == 3
