"""Agreement coefficients against their explicit definitions and other libraries."""

from __future__ import annotations

from itertools import permutations

import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from components.rewards.agreement import alpha, between, kappa, spearman, weighted_kappa

SCORES = st.integers(1, 5)
PAIRS = st.lists(st.tuples(SCORES, SCORES), min_size=2, max_size=30)
UNITS = st.lists(st.lists(SCORES, max_size=4), max_size=12)


@given(PAIRS)
def test_kappas_are_those_of_scikit_learn(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    assume(len({*first, *second}) > 1)
    weighted, plain = (cohen_kappa_score(first, second, labels=range(1, 6), weights=how) for how in ("quadratic", None))
    assert weighted_kappa(first, second) == pytest.approx(weighted)
    assert kappa(first, second) == pytest.approx(plain)


@given(PAIRS)
def test_rank_correlation_is_that_of_scipy(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    result = spearman(first, second)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert result is None
    else:
        assert result == pytest.approx(scipy.stats.spearmanr(first, second).statistic)


@given(UNITS)
def test_alpha_by_its_definition(units):
    """Return alpha: disagreement within units over disagreement of all values, over ordered pairs."""
    paired = [values for values in units if len(values) > 1]
    everything = [value for values in paired for value in values]
    n = len(everything)
    within = sum(sum((a - b) ** 2 for a, b in permutations(v, 2)) / (len(v) - 1) for v in paired) / max(n, 1)
    overall = sum((a - b) ** 2 for a, b in permutations(everything, 2)) / max(n * (n - 1), 1)
    result = alpha(units)
    assert result == (pytest.approx(1 - within / overall, abs=1e-9) if overall else None)


def test_alpha_of_the_published_example():
    """Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), section C: interval data, 0.849."""
    rows = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    ]
    units = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    assert alpha(units) == pytest.approx(0.849, abs=5e-4)


def test_nothing_to_tell_apart_has_no_value():
    assert alpha([[3, 3], [3, 3]]) is None
    assert alpha([[1], [2]]) is None
    assert weighted_kappa([2, 2], [2, 2]) is None
    assert kappa([], []) is None


def test_judges_are_compared_where_both_judged():
    result = between({"human": {"a": 1.0, "b": 0.0, "c": 0.5}, "judge": {"a": 0.9, "b": 0.1}, "last": {"c": 0.5}})
    assert result["human_judge/episodes"] == 2.0
    assert result["human_judge/spearman"] == 1.0
    assert result["human_judge/alpha"] == pytest.approx(alpha([[1.0, 0.9], [0.0, 0.1]]))
    assert (result["judge_last/episodes"], "judge_last/alpha" in result) == (0.0, False)
    assert result["alpha"] == pytest.approx(alpha([[1.0, 0.9], [0.0, 0.1], [0.5, 0.5]]))
