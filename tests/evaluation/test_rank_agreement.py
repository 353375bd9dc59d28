"""Rank agreement of two rewards: Kendall's tau-b, and groups whose advantages flip."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.evaluation.rank_agreement import centred, rank_agreement

VALUES = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=16)


def test_the_correlation_counts_ties_by_hand():
    """Of the six pairs, first ties one and second ties one other; four are concordant and none discordant: 4 / 5."""
    first, second = ({"g": dict(zip("abcd", side, strict=True))} for side in ([1, 2, 2, 3], [1, 1, 3, 4]))
    assert rank_agreement(first, second).tau == pytest.approx(4 / 5)


@given(VALUES)
def test_a_positive_scale_and_a_shift_change_nothing(pairs):
    first = {"g": {str(index): float(value) for index, (value, _) in enumerate(pairs)}}
    second = {"g": {name: 3 * value + 7 for name, value in first["g"].items()}}
    agreement = rank_agreement(first, second)
    assert agreement.flips == []
    assert agreement.tau in (None, pytest.approx(1.0))


def test_an_advantage_that_changes_sign_flips_its_group():
    first = {"a": {"a/0": 1.0, "a/1": 0.0, "a/2": 0.0}, "b": {"b/0": 1.0, "b/1": 0.0}}
    second = {"a": {"a/0": 1.0, "a/1": 0.8, "a/2": 0.0}, "b": {"b/0": 2.0, "b/1": 0.0}}
    agreement = rank_agreement(first, second)
    assert agreement.groups == agreement.ranked == 2
    assert agreement.flipped == 0.5
    (flip,) = agreement.flips
    assert (flip.group, flip.signs, flip.swapped, flip.episodes) == ("a", ["a/1"], [], ["a/1"])
    assert flip.first["a/1"] == pytest.approx(-1 / 3)
    assert flip.second["a/1"] == pytest.approx(0.2)


def test_episodes_that_change_order_flip_their_group():
    first = {"a": {"a/0": 0.0, "a/1": 2.0, "a/2": 3.0}}
    second = {"a": {"a/0": 0.0, "a/1": 3.0, "a/2": 2.0}}
    (flip,) = rank_agreement(first, second).flips
    assert flip.signs == []
    assert flip.swapped == [("a/1", "a/2")]
    assert set(flip.episodes) == {"a/1", "a/2"}


def test_groups_without_two_common_scores_and_without_spread_do_not_count():
    first = {"one": {"x": 1.0, "y": 0.0}, "equal": {"p": 1.0, "q": 1.0}, "absent": {"a": 1.0, "b": 0.0}}
    second = {"one": {"x": 1.0}, "equal": {"p": 1.0, "q": 0.0}}
    agreement = rank_agreement(first, second)
    assert (agreement.groups, agreement.ranked, agreement.tau, agreement.flipped) == (1, 0, None, 0)
    assert rank_agreement({}, {}).flipped is None


def test_rounding_errors_are_no_spread():
    assert centred([0.1 + 0.2, 0.3]) == [0.0, 0.0]
    assert math.fsum(centred([1.0, 2.0, 6.0])) == pytest.approx(0.0)
    assert rank_agreement({"a": {"x": 0.1 + 0.2, "y": 0.3}}, {"a": {"x": 0.0, "y": 1.0}}).ranked == 0
