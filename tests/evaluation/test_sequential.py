"""Confidence sequences of evaluations that stop: their formula, and their error rates under continuous looks."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import betaln
from scipy.stats import binomtest

from components.evaluation.metrics import paired_difference, summarise
from components.evaluation.sequential import (
    alpha_of,
    confidence_sequence,
    describe,
    log_capital,
    paired_sequence,
    scenarios_to_decide,
)
from components.evaluation.verdict import paired_scenarios
from docs.sequential import CASES, simulated
from tests.pages.test_report import episode

RUNS = 400


def test_of_binary_values_the_capital_is_the_beta_binomial_mixture():
    for won, lost, m in ((0, 0, 0.5), (3, 1, 0.5), (40, 60, 0.3), (100, 20, 0.9), (0, 30, 0.01)):
        exact = betaln(2 + won, 2 + lost) - betaln(2, 2) - won * math.log(m) - lost * math.log(1 - m)
        assert log_capital({1.0: won, 0.0: lost}, m) == pytest.approx(exact, abs=1e-9)


def test_scenarios_without_a_difference_do_not_change_the_capital_against_no_gain():
    few, many = ({1.0: 9, 0.0: 2, 0.5: ties} for ties in (0, 1000))
    assert log_capital(few, 0.5) == pytest.approx(log_capital(many, 0.5))


values = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=60)


@given(values, st.sampled_from([0.01, 0.05, 0.2]))
def test_the_interval_contains_the_mean_ends_where_the_capital_does_and_ignores_the_order(sample, alpha):
    low, high = confidence_sequence(sample, alpha)
    assert 0 <= low <= high <= 1
    if sample:
        assert low - 1e-9 <= sum(sample) / len(sample) <= high + 1e-9
    shuffled = random.Random(0).sample(sample, len(sample))
    assert confidence_sequence(shuffled, alpha) == pytest.approx((low, high))
    for end in (low, high):
        if 0 < end < 1:
            counts = {value: sample.count(value) for value in sample}
            assert log_capital(counts, end) == pytest.approx(math.log(1 / alpha), abs=1e-6)


def test_the_interval_of_differences_is_symmetric_and_narrows():
    low, high = paired_sequence([1.0] * 12 + [-1.0] * 3 + [0.0] * 40, 0.05)
    mirrored = paired_sequence([-1.0] * 12 + [1.0] * 3 + [0.0] * 40, 0.05)
    assert (-high, -low) == pytest.approx(mirrored)
    longer = paired_sequence(([1.0] * 12 + [-1.0] * 3 + [0.0] * 40) * 10, 0.05)
    assert longer[1] - longer[0] < (high - low) / 2
    assert paired_sequence([], 0.05) == (-1.0, 1.0)


def test_without_a_difference_false_decisions_are_at_most_alpha_under_continuous_looks():
    for changed in (0.1, 0.5, 1.0):
        row = simulated(changed, 0.0, RUNS, batch=1)
        assert binomtest(row["wrong"], RUNS, 0.05, alternative="greater").pvalue > 0.001, changed
        assert row["wrong"] == row["decided"] == row["missed"]


def test_the_interval_covers_the_gain_at_every_look():
    for changed, gain in ((0.3, 0.1), (0.5, 0.4)):
        row = simulated(changed, gain, RUNS // 4, batch=1)
        assert binomtest(row["missed"], RUNS // 4, 0.05, alternative="greater").pvalue > 0.001, (changed, gain)
        assert row["wrong"] <= row["missed"]


def test_larger_gains_need_fewer_scenarios():
    played = [simulated(changed, gain, 200)["played"] for changed, gain in CASES[:5]]
    assert played == sorted(played, reverse=True)


def test_the_predicted_number_of_scenarios_decides_at_about_80_percent_power():
    for gain, changed in ((0.1, 0.3), (0.2, 0.3), (0.3, 0.4)):
        needed = scenarios_to_decide(gain, changed, 0.05)
        assert needed > paired_scenarios(gain, changed)
        steps = np.random.default_rng(1).random((1000, needed))
        won = (steps < (changed + gain) / 2).sum(1)
        lost = (steps >= 1 - (changed - gain) / 2).sum(1)
        capital = [log_capital({1.0: int(w), 0.0: int(f)}, 0.5) for w, f in zip(won, lost, strict=True)]
        assert 0.74 < sum(value >= math.log(20) for value in capital) / 1000 < 0.86, (gain, changed)


def test_metrics_of_an_evaluation_that_may_stop_use_the_sequence():
    before, after = [episode(index, False) for index in range(20)], [episode(index, index < 14) for index in range(12)]
    paired = paired_difference(before, after, 0.1)
    assert (paired["method"], paired["n"], paired["confidence"]) == ("sequence", 12, 0.9)
    assert (paired["low"], paired["high"]) == paired_sequence([1.0] * 12, 0.1)
    summary = summarise(after, 0.1)
    assert (summary["success"]["low"], summary["success"]["high"]) == confidence_sequence([1.0] * 12, 0.1)
    assert summary["reward"]["low"] is summary["turns"]["high"] is None
    assert summarise(after)["turns"]["low"] is not None
    assert "confidence" not in paired_difference(before, after)


def test_the_smallest_alpha_counts_and_the_end_is_described():
    sequence = {"alpha": 0.1, "scenarios": 64, "planned": 288, "decided": True}
    assert alpha_of({}, {}) is None
    assert alpha_of({}, {"sequence": sequence}, {"sequence": {"alpha": 0.05}}) == 0.05
    assert describe(sequence) == "decided after 64 of 288 scenarios (confidence sequence, level 0.9)"
    whole = describe(sequence | {"scenarios": 288, "decided": False})
    assert whole == "not decided by all 288 scenarios (confidence sequence, level 0.9)"
