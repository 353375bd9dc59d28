"""Metrics compared with independent sources: scipy, published examples, and an exact bootstrap distribution."""

from __future__ import annotations

import itertools
import json
import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from components.evaluation.metrics import (
    all_of_k,
    any_of_k,
    bootstrap,
    paired_difference,
    paired_success,
    pass_at_k,
    states_success,
    summarise,
    without_success,
)
from components.evaluation.policies import error_classes
from components.evaluation.proportions import newcombe, wilson
from components.trajectories.schema import Failure
from components.trajectories.stored import InMemoryEpisodes
from components.trajectories.truncation import CONTEXT, TURNS, truncated_at
from tests.trajectories.builders import FAILURE, episode


def test_wilson_equals_scipy():
    for n in (1, 2, 7, 60, 1000):
        for successes in {0, 1, n // 3, n // 2, n - 1, n}:
            expected = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
            assert wilson(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12), (successes, n)
        assert wilson(0, n)[0] == 0.0
        assert wilson(n, n)[1] == 1.0


class TestNewcombe:
    def test_published_example(self):
        """Complete response before and after consolidation therapy (Cavo and others 2012): 59, 6, 16, 80 of 161. The
        value is that of the R package contingencytables, which goes with chapter 8 of Fagerland, Lydersen and Laake,
        Statistical Analysis of Contingency Tables, 2017."""
        low, high = newcombe(both=59, gained=6, lost=16, neither=80)
        assert (round(low, 4), round(high, 4)) == (-0.1186, -0.0046)

    def test_uncorrelated_pairs_give_the_interval_of_independent_proportions(self):
        """Without correlation, method 10 for pairs is the hybrid score interval for two samples, which scipy has no
        function for: written out here from scipy's Wilson limits."""
        low, high = newcombe(both=8, gained=8, lost=4, neither=4)  # 8·4 = 8·4: φ = 0
        after, before = (stats.binomtest(k, 24).proportion_ci(method="wilson") for k in (16, 12))
        difference = 16 / 24 - 12 / 24
        assert low == pytest.approx(difference - math.hypot(16 / 24 - after.low, before.high - 12 / 24))
        assert high == pytest.approx(difference + math.hypot(after.high - 16 / 24, 12 / 24 - before.low))

    @given(st.tuples(*[st.integers(0, 40)] * 4).filter(any))
    def test_it_holds_the_difference_and_is_mirrored(self, counts):
        both, gained, lost, neither = counts
        low, high = newcombe(both=both, gained=gained, lost=lost, neither=neither)
        difference = (gained - lost) / sum(counts)
        assert -1 - 1e-12 <= low <= difference <= high <= 1 + 1e-12
        mirrored = newcombe(both=both, gained=lost, lost=gained, neither=neither)
        assert mirrored == pytest.approx((-high, -low), abs=1e-12)

    def test_no_change_is_not_certainty(self):
        low, high = newcombe(both=10, gained=0, lost=0, neither=10)
        assert low < 0 < high

    def test_coverage(self):
        """The exact coverage of the interval, summed over all tables, is about 95 %."""
        n, p_both, p_gained, p_lost = 20, 0.3, 0.3, 0.1
        covered = 0.0
        for both, gained, lost in itertools.product(range(n + 1), repeat=3):
            neither = n - both - gained - lost
            if neither >= 0:
                low, high = newcombe(both=both, gained=gained, lost=lost, neither=neither)
                if low <= p_gained - p_lost <= high:
                    p_neither = 1 - p_both - p_gained - p_lost
                    covered += stats.multinomial.pmf(
                        [both, gained, lost, neither], n, [p_both, p_gained, p_lost, p_neither]
                    )
        assert 0.93 < covered < 0.98


class TestBootstrap:
    def test_it_equals_scipys_on_the_same_distribution(self):
        values = list(np.random.default_rng(3).normal(size=40))
        expected = stats.bootstrap(
            (values,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(4)
        ).confidence_interval
        assert bootstrap([[value] for value in values]) == pytest.approx((expected.low, expected.high), abs=0.02)

    def test_whole_clusters_are_drawn(self):
        """Two clusters of unequal size: a resample is one of three means, with probabilities 1/4, 1/2, 1/4."""
        assert bootstrap([[1.0] * 30, [0.0] * 10]) == (0.0, 1.0)

    def test_the_same_values_give_the_same_interval(self):
        clusters = [[0.1], [0.9], [0.4, 0.2]]
        assert bootstrap(clusters) == bootstrap(clusters)

    def test_one_cluster_has_no_interval(self):
        assert bootstrap([[1.0, 0.0]]) == (None, None)

    @given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3), min_size=2, max_size=6))
    @settings(deadline=None, max_examples=20)
    def test_it_lies_within_the_values(self, clusters):
        low, high = bootstrap(clusters)
        values = list(itertools.chain(*clusters))
        assert min(values) - 1e-3 <= low <= high <= max(values) + 1e-3


def mixed():
    return [
        episode("a", success=True, reward=0.9, turns=2, type="refund", difficulty=1),
        episode("b", success=False, reward=0.1, turns=4, type="refund", difficulty=2),
        episode("c", success=True, reward=None, turns=3, type="address", difficulty=2),
        episode("d", success=True, failure=FAILURE, type="address", difficulty=10),
        episode("e", failure=Failure("engine", "ContextOverflow", "2,100 tokens"), type="address", difficulty=10),
    ]


class TestSummarise:
    def test_failures_and_unscored_are_counted_apart(self):
        summary = summarise(mixed())
        assert summary["episodes"] == summary["scenarios"] == 5
        assert summary["failures"] == {"count": 2, "by_boundary": {"engine": 1, "environment": 1}}
        assert summary["unscored"] == 1
        assert (summary["success"]["mean"], summary["success"]["n"]) == (pytest.approx(2 / 3), 3)
        assert (summary["reward"]["mean"], summary["reward"]["n"]) == (pytest.approx(0.5), 2)
        assert (summary["turns"]["mean"], summary["turns"]["n"]) == (3.0, 3)

    def test_intervals(self):
        summary = summarise(mixed())
        expected = stats.binomtest(2, 3).proportion_ci(method="wilson")
        assert (summary["success"]["low"], summary["success"]["high"]) == pytest.approx((expected.low, expected.high))
        assert (summary["reward"]["low"], summary["reward"]["high"]) == pytest.approx((0.1, 0.9))

    def test_by_type_and_difficulty(self):
        summary = summarise(mixed())
        assert list(summary["by_type"]) == ["address", "refund"]
        assert summary["by_type"]["refund"]["success"]["mean"] == 0.5
        assert summary["by_type"]["address"]["failures"]["count"] == 2
        assert list(summary["by_difficulty"]) == ["1", "2", "10"]  # as numbers, not as text
        assert summary["by_difficulty"]["2"]["success"]["mean"] == 0.5
        assert summary["by_difficulty"]["10"]["success"] == {"mean": None, "low": None, "high": None, "n": 0}

    def test_success_without_invalid_actions_is_that_of_the_episodes_that_had_none(self):
        outcomes = [(True, 0), (False, 0), (True, 2), (False, 1), (True, None)]
        summary = summarise(
            [
                episode(name, outcome={"success": success} | ({} if invalid is None else {"invalid_actions": invalid}))
                for name, (success, invalid) in zip("abcde", outcomes, strict=True)
            ]
        )
        assert (summary["invalid"]["mean"], summary["invalid"]["n"]) == (0.5, 4)
        assert (summary["valid_success"]["mean"], summary["valid_success"]["n"]) == (0.5, 2)

    def test_success_is_unknown_if_no_episode_that_ended_by_itself_states_it(self):
        silent, stated = episode("a", outcome={"answer": "5"}), episode("b", outcome={"success": False})
        assert not states_success([silent])
        assert states_success([silent, stated])
        cut = episode("a", outcome={})
        cut.metrics[TURNS] = 1.0
        assert states_success([cut]), "an episode that was cut off did not succeed"
        assert without_success(summarise([silent]))["success"]["mean"] is None
        assert not states_success([episode("a", outcome={"success": None})])

    def test_it_is_strict_json(self):
        for rows in (mixed(), mixed()[3:], mixed()[:1], []):
            summary = summarise(rows)
            assert json.loads(json.dumps(summary, allow_nan=False)) == summary
        assert summary["success"] == {"mean": None, "low": None, "high": None, "n": 0}

    def test_episodes_of_a_scenario_are_drawn_together(self):
        """Copies of an episode add no information, so they do not narrow the interval."""
        rewards = [0.0, 0.3, 0.5, 1.0, 0.8]
        once = summarise([episode(f"s{i}", reward=r, success=True) for i, r in enumerate(rewards)])
        often = summarise(
            [episode(f"s{i}", k, reward=r, success=True) for i, r in enumerate(rewards) for k in range(4)]
        )
        assert often["reward"]["mean"] == pytest.approx(once["reward"]["mean"])
        assert (often["reward"]["low"], often["reward"]["high"]) == pytest.approx(
            (once["reward"]["low"], once["reward"]["high"])
        )


def played(**successes):
    return [episode(name, success=success) for name, success in successes.items()]


class TestPairedDifference:
    def test_improved_regressed_and_interval(self):
        before = played(a=True, b=False, c=False, d=True, e=False)
        after = played(e=False, d=False, c=True, b=True, a=True)
        result = paired_difference(before, after)
        assert result["improved"] == ["b", "c"]
        assert result["regressed"] == ["d"]
        assert (result["before"], result["after"], result["n"]) == (0.4, 0.6, 5)
        assert result["difference"] == pytest.approx(0.2)
        assert (result["low"], result["high"]) == newcombe(both=1, gained=2, lost=1, neither=1)
        assert result["method"] == "newcombe"
        assert json.loads(json.dumps(result, allow_nan=False)) == result

    def test_it_has_the_direction_of_after_less_before(self):
        before = [episode(f"s{i}", success=i < 10) for i in range(60)]
        after = [episode(f"s{i}", success=i < 40) for i in range(60)]
        result = paired_difference(before, after)
        assert result["difference"] == pytest.approx(0.5)
        assert 0.3 < result["low"] < 0.5 < result["high"] < 0.7
        assert paired_difference(after, before)["high"] == pytest.approx(-result["low"])

    def test_scenarios_without_a_pair_are_left_out_by_name(self):
        before = [*played(a=False, b=True, c=True), episode("d", failure=FAILURE)]
        after = [*played(a=True, b=True, d=True), episode("e", success=True)]
        result = paired_difference(before, after)
        assert (result["n"], result["improved"], result["regressed"]) == (2, ["a"], [])
        assert result["left_out"] == ["c", "d", "e"]

    def test_no_shared_scenario_is_an_error(self):
        with pytest.raises(ValueError, match="share no finished scenario"):
            paired_difference(played(a=True), played(b=True))

    def test_pairs_without_a_finished_scenario_are_left_out(self):
        failed = [episode("a", failure=FAILURE)]
        pairs = {"1": (played(a=True), failed, None), "2": (played(a=True), played(a=False), None)}
        assert {name: paired["difference"] for name, paired in paired_success(pairs).items()} == {"2": -1.0}

    def test_several_episodes_of_a_scenario_are_resampled_together(self):
        rng = np.random.default_rng(0)

        def episodes(rate):
            return [episode(f"s{i}", k, success=bool(rng.random() < rate)) for i in range(40) for k in range(4)]

        before, after = episodes(0.3), episodes(0.7)
        result = paired_difference(before, after)
        rates = [[fmean(t.success for t in rows if t.group == f"s{i}") for i in range(40)] for rows in (before, after)]
        expected = stats.bootstrap(
            (rates[1], rates[0]),
            lambda x, y, axis: np.mean(x, axis=axis) - np.mean(y, axis=axis),
            paired=True,
            method="percentile",
            rng=np.random.default_rng(1),
        ).confidence_interval
        assert result["method"] == "bootstrap"
        assert result["difference"] == pytest.approx(fmean(rates[1]) - fmean(rates[0]))
        assert (result["low"], result["high"]) == pytest.approx((expected.low, expected.high), abs=0.02)
        assert set(result["improved"]).isdisjoint(result["regressed"])


class TestPassAtK:
    @given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
    def test_the_estimators_are_the_means_over_all_subsets(self, counts):
        """The unbiased estimate is the mean of the statistic over all k of the n samples."""
        n, c, k = counts
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert any_of_k(n, c, k) == pytest.approx(fmean(any(subset) for subset in subsets))
        assert all_of_k(n, c, k) == pytest.approx(fmean(all(subset) for subset in subsets))

    def test_scenarios_count_equally_and_short_ones_are_left_out(self):
        rows = [episode("a", k, success=k < 2) for k in range(4)]  # 2 of 4
        rows += [episode("b", k, success=True) for k in range(4)]
        rows += [episode("c", 0, success=True), episode("c", 1, failure=FAILURE)]
        result = pass_at_k(rows, 2)
        assert result["pass_at_k"]["mean"] == pytest.approx((5 / 6 + 1) / 2)
        assert result["pass_hat_k"]["mean"] == pytest.approx((1 / 6 + 1) / 2)
        assert (result["pass_at_k"]["n"], result["left_out"]) == (2, 1)
        assert pass_at_k([], 2)["pass_at_k"] == {"mean": None, "low": None, "high": None, "n": 0}

    def test_several_episodes_of_a_scenario_widen_the_interval_of_success(self):
        """Identical episodes of a scenario say no more than one of them."""
        once = summarise([episode(f"s{i}", success=i < 10) for i in range(20)])["success"]
        often = summarise([episode(f"s{i}", k, success=i < 10) for i in range(20) for k in range(8)])["success"]
        assert often["mean"] == once["mean"]
        assert often["high"] - often["low"] == pytest.approx(once["high"] - once["low"], abs=0.06)


def test_error_classes_say_how_an_episode_ended():
    cut = episode("cut", success=False)
    cut.histories[0].messages[-1].finish_reason = "length"
    unread = episode("unread", success=False)
    unread.metrics["parse_errors"] = 2.0
    rows = [
        episode("good", success=True),
        episode("failed", failure=FAILURE),
        unread,
        truncated_at(episode("long", success=True), TURNS),
        truncated_at(episode("full"), CONTEXT),
        cut,
        *(episode(f"wrong{i}", success=False) for i in range(2)),
    ]
    found = {
        error.name: [rows[place].group for place in error.places] for error in error_classes(InMemoryEpisodes(rows))
    }
    assert found == {
        "wrong result": ["wrong0", "wrong1"],
        f"{FAILURE.boundary}: {FAILURE.kind}": ["failed"],
        "message cut off": ["cut"],
        "no readable action": ["unread"],
        "out of context": ["full"],
        "out of turns": ["long"],
    }
    assert next(iter(found)) == "wrong result"  # the largest first
