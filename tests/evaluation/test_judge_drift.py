"""Drift of a judge: the exact test against its definition, the measures by hand, and the rate of false alarms."""

from __future__ import annotations

import random
from itertools import product
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import wilcoxon

from components.evaluation.judge_drift import (
    TESTS,
    compare_judgements,
    flipped_pairs,
    level,
    p_values,
    signed_rank_p,
    smallest_p,
)
from components.evaluation.proportions import wilson

GROUPS = [["a/0", "a/1", "a/2"], ["b/0", "b/1"]]
FIRST = {"a/0": 0.1, "a/1": 0.5, "a/2": 0.9, "b/0": 0.5, "b/1": 0.5}


def by_enumeration(differences: list[float], two_sided: bool) -> float:
    """The definition: the share of all assignments of signs whose rank sum is at least as extreme."""
    values = [value for value in differences if value]
    sizes = sorted(abs(value) for value in values)
    ranks = [
        fmean(place for place, size in enumerate(sizes, 1) if size == abs(value))  # mean rank of ties
        for value in values
    ]
    observed = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    sums = [
        sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign)
        for signs in product((0, 1), repeat=len(ranks))
    ]
    upper = fmean(total >= observed for total in sums)
    return min(2 * min(upper, fmean(total <= observed for total in sums)), 1.0) if two_sided else upper


@given(st.lists(st.integers(-4, 4).map(float), max_size=8), st.booleans())
def test_the_p_value_is_that_of_all_signs(differences, two_sided):
    expected = by_enumeration(differences, two_sided) if any(differences) else 1.0
    assert signed_rank_p(differences, two_sided=two_sided) == pytest.approx(expected)


def test_the_p_value_without_ties_is_scipys():
    draw = random.Random(0)
    for size in (5, 20, 45):
        differences = [draw.gauss(0.3, 1.0) for _ in range(size)]
        for two_sided, side in ((True, "two-sided"), (False, "greater")):
            expected = wilcoxon(differences, alternative=side, method="exact").pvalue
            assert signed_rank_p(differences, two_sided=two_sided) == pytest.approx(expected)


def test_equal_judgements_have_not_drifted():
    metrics = compare_judgements(GROUPS, first=FIRST, control=FIRST, later=FIRST)
    assert metrics["shift"] == metrics["flips"] == metrics["unscored"] == 0.0
    assert metrics["shift_p"] == metrics["flips_p"] == metrics["unscored_p"] == 1.0


def test_the_shift_is_the_mean_over_groups_of_episodes_scored_in_both():
    later = {"a/0": 0.2, "a/1": 0.6, "a/2": None, "b/0": 0.9, "b/1": 0.7}
    metrics = compare_judgements(GROUPS, first=FIRST, control=FIRST, later=later)
    assert metrics["shift"] == pytest.approx((0.1 + 0.3) / 2)
    assert (metrics["shift_low"], metrics["shift_high"]) == (pytest.approx(0.1), pytest.approx(0.3))
    assert (metrics["unscored_first"], metrics["unscored"]) == (0.0, 1 / 5)


def test_a_flip_is_a_pair_in_another_order_ties_included():
    later = {"a/0": 0.7, "a/1": 0.6, "a/2": 0.9, "b/0": 0.5, "b/1": 0.4}
    assert flipped_pairs(GROUPS[0], FIRST, later) == [True, False, False]
    assert flipped_pairs(GROUPS[1], FIRST, later) == [True]  # a tie before
    assert flipped_pairs(GROUPS[0], FIRST, dict.fromkeys(FIRST, 0.5)) == [True, True, True]  # ties since
    assert flipped_pairs(GROUPS[0], FIRST, {**later, "a/0": None}) == [False]
    assert compare_judgements(GROUPS, first=FIRST, control=FIRST, later=later)["flips"] == pytest.approx(2 / 4)


def test_a_judge_that_only_reverses_the_order_is_detected_by_flips_alone():
    groups = [[f"{group}/{i}" for i in range(4)] for group in range(20)]
    first = {name: int(name[-1]) / 3 for group in groups for name in group}
    reversed_ = {name: 1 - score for name, score in first.items()}
    metrics = compare_judgements(groups, first=first, control=first, later=reversed_)
    assert metrics["shift"] == pytest.approx(0.0)
    assert metrics["shift_p"] == 1.0
    assert (metrics["flips"], metrics["flips_control"]) == (1.0, 0.0)
    assert metrics["flips_p"] == pytest.approx(0.5**20)


def test_what_is_not_scored_is_not_compared():
    metrics = compare_judgements(GROUPS, first=FIRST, control=FIRST, later=dict.fromkeys(FIRST, None))
    assert not {"shift", "flips", "shift_p", "flips_p"} & set(metrics)
    assert metrics["unscored"] == 1.0
    assert metrics["unscored_p"] == pytest.approx(0.5**2)


def test_levels_share_the_probability_of_a_false_alarm():
    assert level(0.01, 9) * TESTS * 9 == pytest.approx(0.01)
    assert level(0.01, 0) == pytest.approx(0.01 / TESTS)
    assert smallest_p(16) == pytest.approx(signed_rank_p([1.0] * 16, two_sided=True))


def test_a_noisy_judge_that_does_not_change_rarely_raises_an_alarm():
    """At alpha = 0.2 over 4 compared rounds, in 150 runs."""
    draw, alpha, rounds, runs = random.Random(1), 0.2, 5, 150
    groups = [[f"{group}/{i}" for i in range(4)] for group in range(16)]
    truth = {name: draw.random() for group in groups for name in group}

    def judgement() -> dict[str, float | None]:
        return {
            name: None if draw.random() < 0.05 else score if draw.random() < 0.8 else 1 - score
            for name, score in truth.items()
        }

    def smallest() -> float:
        first, control = judgement(), judgement()
        later = [p_values(groups, first=first, control=control, later=judgement()) for _ in range(rounds - 1)]
        return min(value for values in later for value in values.values())

    values = [smallest() for _ in range(runs)]
    alarms = sum(value <= level(alpha, rounds - 1) for value in values)
    assert wilson(alarms, runs)[0] <= alpha
    assert alarms > 0
    assert sum(value <= alpha for value in values) > 2 * alarms
