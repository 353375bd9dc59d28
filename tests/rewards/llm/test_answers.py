"""Parsing of judges' answers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.rewards.llm.answers import find_json, read_scores


def is_object(value) -> bool:
    return isinstance(value, dict) and "scores" in value


@pytest.mark.parametrize(
    "text",
    [
        '{"scores": [1]}',
        '```json\n{"scores": [1]}\n```',
        'Here it is:\n\n```\n{"scores": [1]}\n```\nI hope {this} helps [a lot].',
        'The scores {as asked} are {"scores": [1]}, and no others.',
        '<think>{"scores": [9]} would be too much</think>{"scores": [1]}',
        'I think {"scores": [9]}</think>\n{"scores": [1]}',
        '{"answer": {"scores": [1]}}',
        '[{"scores": [1]}]',
    ],
)
def test_json_is_found_in_what_is_written_around_it(text):
    assert find_json(text, is_object) == {"scores": [1]}


@pytest.mark.parametrize("text", ["", "no", "{", '{"scores": [1', "[[[[" * 50_000, '{"other": 1}', "{" * 100_000])
def test_what_is_no_json_is_none(text):
    assert find_json(text, is_object) is None


def test_nan_spoils_one_score_and_not_the_answer():
    result = find_json('{"scores": [NaN, 1, Infinity]}', is_object)
    assert math.isnan(result["scores"][0])
    assert read_scores(dict(zip("abc", result["scores"], strict=True))) == {"b": 1.0}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ([0.2, 0.9, 1], [0.2, 0.9, 1.0]),
        ([0, 1], [0.0, 1.0]),
        ([2, 10, 0, 1], [0.2, 1.0, 0.0, 0.1]),
        ([7.5, 3], [0.75, 0.3]),
        ([90, 5, 40], [0.9, 0.05, 0.4]),
        (["8/10", "40%", "3 out of 4", 0.5], [0.8, 0.4, 0.75, 0.5]),
        ([0.3, 90, 0.7, 8], [0.3, 0.9, 0.7, 0.8]),
        ([0.3, 1.7, -0.2], [0.3, 1.0, 0.0]),
        (["0.4", " 1 "], [0.4, 1.0]),
        (["120%", 500], [1.0, 1.0]),
    ],
)
def test_scores_come_out_from_0_to_1_whatever_the_scale(written, read):
    result = read_scores({str(i): value for i, value in enumerate(written)})
    assert list(result.values()) == pytest.approx(read)


@pytest.mark.parametrize("value", [None, "good", "NaN", float("nan"), float("inf"), True, [], {}, "8/0", "", "1/2/3"])
def test_what_is_no_score_is_left_out(value):
    assert read_scores({"a": value, "b": 0.5}) == {"b": 0.5}


@given(st.dictionaries(st.text(max_size=3), st.one_of(st.floats(), st.integers(), st.text(max_size=8), st.none())))
def test_a_score_is_always_from_0_to_1(given_):
    result = read_scores(given_)
    assert set(result) <= set(given_)
    assert all(0 <= score <= 1 for score in result.values())


@given(st.text())
def test_any_text_can_be_looked_through(text):
    result = find_json(text, is_object)
    assert result is None or is_object(result)
