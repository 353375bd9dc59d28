"""Measures of a judge, compared with their definitions, scipy and scikit-learn."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr
from sklearn.metrics import roc_auc_score

from components.evaluation.calibration import (
    LEAST,
    JudgedEpisode,
    Mark,
    auc,
    curve,
    judge_by,
    measure,
    partial,
    ranks,
    roc,
    spearman,
    written,
)
from components.evaluation.spec import MarksSpec
from components.trajectories.schema import ToolCall
from tests.trajectories.builders import episode, tool_talk

FEW = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(1, 9)), min_size=4, max_size=20)
"""Scores, truths and lengths with many ties."""


def judged(scores, truths, lengths=None, groups=None):
    """Return episodes with one judgement each."""
    count = len(scores)
    lengths, groups = lengths or [1.0] * count, groups or [str(n) for n in range(count)]
    rows = zip(scores, truths, lengths, groups, strict=True)
    return [
        JudgedEpisode(f"e{n}", group, truth, length, [score]) for n, (score, truth, length, group) in enumerate(rows)
    ]


def noisy(seed=0, groups=40, size=6):
    """Return episodes scored by a noisy judge that prefers longer texts and episodes shown first."""
    draw = random.Random(seed)
    episodes = []
    for group in range(groups):
        for n in range(size):
            truth, length = float(draw.random() < 0.4), float(draw.randint(10, 300))
            positions = [n / (size - 1), ((n + 3) % size) / (size - 1)]
            scores = [round(truth + length / 300 - position + draw.gauss(0, 0.5), 1) for position in positions]
            episodes.append(JudgedEpisode(f"{group}/{n}", str(group), truth, length, scores, positions))
    return episodes


def once(values):
    return np.ones((1, len(values)))


@given(FEW)
def test_auc_is_the_share_of_pairs_in_which_the_good_one_scores_higher_and_ties_count_half(rows):
    scores, good = [row[0] for row in rows], [row[1] > 0 for row in rows]
    value = float(auc(np.array(scores, float), np.array(good), once(rows))[0])
    pairs = [
        (a > b) + (a == b) / 2
        for a, a_good in zip(scores, good, strict=True)
        for b, b_good in zip(scores, good, strict=True)
        if a_good and not b_good
    ]
    assert math.isnan(value) if not pairs else value == pytest.approx(fmean(pairs), abs=1e-12)


@given(FEW)
def test_rank_correlations_are_those_of_scipy_and_the_formula(rows):
    score_N, truth_N, length_N = (np.array(values, float) for values in zip(*rows, strict=True))
    if any(len(set(values)) == 1 for values in (score_N, truth_N, length_N)):
        return
    assert float(spearman(score_N, truth_N, once(rows))[0]) == pytest.approx(spearmanr(score_N, truth_N).statistic)
    sl, st_, lt = (spearmanr(a, b).statistic for a, b in ((score_N, length_N), (score_N, truth_N), (length_N, truth_N)))
    if max(abs(st_), abs(lt)) < 0.999:
        expected = (sl - st_ * lt) / math.sqrt((1 - st_**2) * (1 - lt**2))
        assert float(partial(score_N, length_N, truth_N, once(rows))[0]) == pytest.approx(expected)


@given(FEW, st.data())
def test_a_weight_is_a_number_of_copies(rows, data):
    weights = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    value_N = np.array([row[0] for row in rows], float)
    copies = np.repeat(value_N, weights)
    rank_N = ranks(value_N, np.array([weights], float))[0]
    assert np.repeat(rank_N, weights) == pytest.approx(rankdata(copies))


def test_measures_of_a_noisy_judge():
    episodes = noisy()
    result = measure(episodes)
    scores, truths = [judgement.scores[0] for judgement in episodes], [judgement.truth for judgement in episodes]
    assert result["auc"]["value"] == pytest.approx(roc_auc_score(truths, scores))
    assert result["spearman"]["value"] == pytest.approx(spearmanr(scores, truths).statistic)
    within, pairs = [], []
    for group in {judgement.group for judgement in episodes}:
        members = [judgement for judgement in episodes if judgement.group == group]
        if len({judgement.truth for judgement in members}) > 1:
            within.append(
                spearmanr(
                    [judgement.scores[0] for judgement in members], [judgement.truth for judgement in members]
                ).statistic
            )
        for a, b in combinations(members, 2):
            if a.truth != b.truth:
                difference = (a.scores[0] - b.scores[0]) * (a.truth - b.truth)
                pairs.append(1.0 if difference > 0 else 0.5 if difference == 0 else 0.0)
    assert result["spearman_within"]["value"] == pytest.approx(fmean(within))
    assert (result["agreement"]["value"], result["agreement"]["n"]) == (pytest.approx(fmean(pairs)), len(pairs))
    assert result["noise"]["value"] == pytest.approx(fmean(stdev(judgement.scores) for judgement in episodes))
    assert result["length_bias"]["low"] > 0.2
    assert result["position_bias"]["high"] < -0.3
    for name in ("auc", "spearman", "spearman_within", "agreement", "length_bias", "position_bias", "noise"):
        assert result[name]["low"] < result[name]["value"] < result[name]["high"]
    assert (result["episodes"], result["groups"], result["threshold"]) == (240, 40, 0.5)


def test_the_interval_covers_the_value_of_a_large_sample():
    """In about 38 of 40 samples of one judge, the interval contains the value of a very large sample."""
    large = noisy(seed=99, groups=1500)
    true = roc_auc_score([judgement.truth for judgement in large], [judgement.scores[0] for judgement in large])
    intervals = [measure(noisy(seed=seed))["auc"] for seed in range(40)]
    assert sum(interval["low"] <= true <= interval["high"] for interval in intervals) >= 34


def test_a_constant_judge_and_a_perfect_judge():
    truths = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    lengths, groups = [5.0, 3.0, 9.0, 2.0, 4.0, 7.0], ["a", "a", "a", "b", "b", "b"]
    same = measure(judged([0.3] * 6, truths, lengths, groups))
    names = ("auc", "spearman", "spearman_within", "agreement", "length_bias")
    assert [same[name]["value"] for name in names] == [0.5, 0.0, 0.0, 0.5, 0.0]
    right = measure(judged(truths, truths, lengths, groups))
    assert [right[name]["value"] for name in ("auc", "agreement", "length_bias")] == [1.0, 1.0, 0.0]
    assert right["spearman"]["value"] == pytest.approx(1.0)
    wrong = measure(judged([-truth for truth in truths], truths, lengths, groups))
    assert [wrong[name]["value"] for name in ("auc", "agreement")] == [0.0, 0.0]


def test_values_are_none_without_anything_to_measure():
    alike = measure(judged([0.1, 0.5, 0.9], [1.0, 1.0, 1.0]))
    assert [alike[name]["value"] for name in ("auc", "spearman", "spearman_within", "agreement")] == [None] * 4
    assert alike["length_bias"]["value"] is None  # equal lengths
    assert alike["noise"]["value"] is None  # judged once
    assert alike["position_bias"]["value"] is None  # shown alone
    assert measure([])["auc"] == {"value": None, "low": None, "high": None, "n": 0}
    alone = measure(judged([0.1, 0.9], [0.0, 1.0], groups=["a", "a"]))["auc"]
    assert (alone["value"], alone["low"]) == (1.0, None)  # no interval for a single scenario


def test_unscored_episodes_are_excluded():
    episodes = judged([0.1, None, 0.9, 0.2], [0.0, 1.0, 1.0, 0.0])
    result = measure(episodes)
    assert (result["episodes"], result["auc"]["value"]) == (3, 1.0)
    assert sum(bin_["n"] for bin_ in curve(episodes)) == 3
    half = [JudgedEpisode("a", "g", 1.0, 1.0, [0.5, None]), JudgedEpisode("b", "g", 0.0, 1.0, [0.1, 0.3])]
    assert measure(half)["noise"] == {"value": pytest.approx(stdev([0.1, 0.3])), "low": None, "high": None, "n": 1}


def test_the_threshold_is_the_midpoint_of_the_truth_or_the_given_one():
    episodes = judged([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 5.0])
    assert measure(episodes)["threshold"] == 3.0
    assert measure(judged([1.0, 3.0, 2.0, 4.0], [1.0, 2.0, 4.0, 5.0]), threshold=4.5)["auc"]["value"] == 1.0


def test_the_curve_has_equal_scores_in_one_bin_and_all_episodes():
    bins = curve(noisy())
    assert len(bins) == 10
    assert [bin_["score"] for bin_ in bins] == sorted(bin_["score"] for bin_ in bins)
    assert sum(bin_["n"] for bin_ in bins) == 240
    assert bins[-1]["value"] > bins[0]["value"]
    two = curve(judged([0.0] * 7 + [1.0] * 3, [0.0] * 6 + [1.0] * 4))
    assert [(bin_["score"], bin_["n"], bin_["value"]) for bin_ in two] == [
        (0.0, 7, pytest.approx(1 / 7)),
        (1.0, 3, 1.0),
    ]
    assert curve([]) == []


def test_the_area_under_the_roc_is_the_auc():
    episodes = noisy()
    points = roc(episodes, 0.5)
    area = sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in pairwise(points))
    assert area == pytest.approx(measure(episodes)["auc"]["value"])
    assert (points[0], points[-1]) == ((0.0, 0.0), (1.0, 1.0))
    assert roc(judged([0.1, 0.2], [1.0, 1.0]), 0.5) == []


def test_the_length_is_what_the_policy_wrote():
    trajectory = episode(histories=[tool_talk()])
    assert trajectory.histories[0].messages[2].tool_calls == [ToolCall("call_0", "look_up", '{"id": "A7"}')]
    assert written(trajectory) == len('{"id": "A7"}') + len("It is on its way.")


def test_marks_are_minima_of_some_measures_and_maxima_of_others():
    marks = MarksSpec(auc=0.8, agreement=0.7, length_bias=0.3, cost_per_thousand=1.0)
    values = {"auc": 0.75, "agreement": 0.7, "length_bias": -0.4, "cost_per_thousand": None}
    messages = {mark.measure: None if mark.met else str(mark) for mark in judge_by(marks.required(), values)}
    assert messages == {
        "auc": "auc is 0.750, below its mark of 0.8",
        "agreement": None,
        "length_bias": "length_bias is -0.400, above its mark of 0.3",
        "cost_per_thousand": "cost_per_thousand is not known, and its mark is 1",
    }
    assert Mark("noise", 0.1, 0.1, least=False).met
    assert set(LEAST) < set(MarksSpec.model_fields)
