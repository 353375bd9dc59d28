"""Bradley-Terry strengths: maximum of the likelihood, and finite values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from components.rewards.judges.comparison.pairings import shares, strengths


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gradient(theta, points, prior):
    """Return the gradient of the likelihood, computed player by player."""
    collected = []
    for i, own in enumerate(theta):
        created = sum(points[i]) + prior / 2
        expected = sum((points[i][j] + points[j][i]) * sigma(own - other) for j, other in enumerate(theta))
        collected.append(created - expected - prior * sigma(own))
    return collected


@st.composite
def tables(draw):
    size = draw(st.integers(2, 9))
    points = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i):
            if draw(st.booleans()):
                points[i][j] = draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
                points[j][i] = 1 - points[i][j]
    return points


@given(tables(), st.sampled_from([1e-3, 0.1, 1.0, 10.0]))
@settings(max_examples=150, deadline=None)
def test_the_gradient_is_zero_there(points, prior):
    assert max(map(abs, gradient(strengths(points, prior), points, prior))) < 1e-8


@pytest.mark.parametrize("seed", range(5))
def test_scipy_finds_the_same(seed):
    drawn = np.random.default_rng(seed)
    points = drawn.choice([0.0, 0.5, 1.0, 2.0], (6, 6))
    np.fill_diagonal(points, 0)

    def loss(theta):
        total = 0.0
        for i in range(6):
            total -= 0.15 * (math.log(sigma(theta[i])) + math.log(sigma(-theta[i])))
            total -= sum(points[i][j] * math.log(sigma(theta[i] - theta[j])) for j in range(6))
        return total

    best = minimize(loss, np.zeros(6), method="BFGS", options={"gtol": 1e-7})
    assert strengths(points, 0.3) == pytest.approx(list(best.x), abs=1e-4)


def test_minorisation_maximisation_comes_to_the_same_place():
    """Hunter's iteration, with an opponent of strength 1 that all players tie with."""
    points = [[0, 1, 0.5, 1], [0, 0, 1, 0.5], [0.5, 0, 0, 1], [0, 0.5, 0, 0]]
    strength = [1.0] * 4
    for _ in range(5000):
        strength = [
            (sum(points[i]) + 0.25)
            / (
                sum((points[i][j] + points[j][i]) / (strength[i] + strength[j]) for j in range(4))
                + 0.5 / (strength[i] + 1)
            )
            for i in range(4)
        ]
    assert strengths(points, 0.5) == pytest.approx([math.log(value) for value in strength], abs=1e-9)


def test_two_that_met_once_in_closed_form():
    """By symmetry the strengths are ±x; then 1 + α/2 = σ(2x) + α σ(x)."""
    first, second = strengths([[0, 1], [0, 0]], prior=0.4)
    assert first == pytest.approx(-second)
    assert sigma(2 * first) + 0.4 * sigma(first) == pytest.approx(1.2)


def test_who_wins_all_stays_finite_and_places_are_evenly_apart(subtests):
    for size in [2, 8, 40]:
        with subtests.test(size=size):
            points = [[float(i < j) for j in range(size)] for i in range(size)]
            assert all(map(math.isfinite, strengths(points)))
            places = [1 - i / (size - 1) for i in range(size)]
            assert shares(points) == pytest.approx(places, abs=0.05)


def test_who_never_met_is_in_the_middle_and_ties_are_a_half():
    assert shares([[0, 0, 0], [0, 0, 0], [0, 0, 0]]) == [0.5] * 3
    assert shares([[0, 0.5], [0.5, 0]]) == [0.5] * 2
    apart = shares([[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]])  # two pairs that never meet
    assert apart[0] == pytest.approx(apart[2])
    assert apart[0] > 0.5 > apart[1]


def test_whom_one_has_beaten_counts():
    """Both players won once; the first won against a stronger opponent."""
    points = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    result = shares(points)
    assert result[0] > result[1] > result[2]


@given(tables(), st.randoms())
@settings(max_examples=40, deadline=None)
def test_the_order_of_the_players_says_nothing_and_scores_lie_in_0_to_1(points, drawn):
    order = list(range(len(points)))
    drawn.shuffle(order)
    result = shares(points)
    assert shares([[points[i][j] for j in order] for i in order]) == pytest.approx([result[i] for i in order], abs=1e-6)
    assert all(0 <= score <= 1 for score in result)
    assert sum(result) / len(result) == pytest.approx(0.5)
