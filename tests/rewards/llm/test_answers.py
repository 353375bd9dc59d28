"""Parsing of judges' answers: the JSON, the scores on their scale, the names."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.errors import Problem, SpecError
from components.inference.protocol import ChatCompletion
from components.json_text import find_json
from components.rewards.llm.answers import Scale, read_scores
from components.rewards.llm.models.local import ANY_OBJECT, LocalModelClient, PolicyJudge
from components.rewards.llm.rows import by_name, match_names, object_schema, rows_schema
from components.rewards.protocol import RewardResources
from tests.deployment.tiny import TINY


def is_object(value) -> bool:
    return isinstance(value, dict) and "scores" in value


def test_json_is_found_in_what_is_written_around_it(subtests):
    for text in [
        '{"scores": [1]}',
        '```json\n{"scores": [1]}\n```',
        'Here it is:\n\n```\n{"scores": [1]}\n```\nI hope {this} helps [a lot].',
        'The scores {as asked} are {"scores": [1]}, and no others.',
        '<think>{"scores": [9]} would be too much</think>{"scores": [1]}',
        'I think {"scores": [9]}</think>\n{"scores": [1]}',
        '{"scores": [9]} is what the episode says of itself. I say: {"scores": [1]}',
        'It asks for ```json\n{"scores": [9]}\n``` and deserves\n```json\n{"scores": [1]}\n```',
        '```json\n{"scores": [9]}\n```\n{"scores": [1]}',
        '[{"scores": [9]}, {"scores": [9]}] {"scores": [1]}',
        json.dumps([{"quoted": [{}] * 2000}]) + ' {"scores": [1]}',
        '{"why": "it ends its thought </think> early", "scores": [1]}',
        '{"answer": {"scores": [1]}}',
        '[{"scores": [1]}]',
        '{"scores": [1]} (a number in [0, 1))',
        '{"scores": [1]} see [the episode',
        '{"scores": [1]} as it says :{)',
    ]:
        with subtests.test(text=text[:60]):
            result = find_json(text, is_object)
            assert result["scores"] == [1]


def test_quoted_json_does_not_stand_for_an_answer_that_was_cut_off(subtests):
    for rest in ['{"scores": [0', '{"scores": {"a": {"score": 1}, "b": {"sc', '```json\n{"scores": [tr']:
        with subtests.test(rest=rest):
            assert find_json('The episode says {"scores": [9]}. I say: ' + rest, is_object) is None


def test_what_is_no_json_is_none(subtests):
    for text in ["", "no", "{", '{"scores": [1', "[[[[" * 50_000, '{"other": 1}', "{" * 100_000]:
        with subtests.test(text=text[:60]):
            assert find_json(text, is_object) is None


def test_nan_spoils_one_score_and_not_the_answer():
    result = find_json('{"scores": [NaN, 1, Infinity]}', is_object)
    assert math.isnan(result["scores"][0])
    assert read_scores(dict(zip("abc", result["scores"], strict=True)))[0] == {"b": 1.0}


TEN = Scale(0, 10)


def test_scores_are_shares_of_the_declared_scale(subtests):
    for scale, written, read in [
        (Scale(), [0.2, 0.9, 1, 0], [0.2, 0.9, 1.0, 0.0]),
        (Scale(), ["8/10", "40%", "3 out of 4", 0.5], [0.8, 0.4, 0.75, 0.5]),
        (Scale(), ["0.4", " 1 "], [0.4, 1.0]),
        (TEN, [1, 0, 0, 1], [0.1, 0.0, 0.0, 0.1]),
        (TEN, [7.5, 0.8, 10], [0.75, 0.08, 1.0]),
        (Scale(0, 5), [0.3, 0.1, 0.4, 0.5], [0.06, 0.02, 0.08, 0.1]),
        (Scale(1, 5), [1, 3, 5], [0.0, 0.5, 1.0]),
        (Scale(-1, 1), [-1, 0, "75%"], [0.0, 0.5, 0.75]),
    ]:
        with subtests.test(written=written):
            result, problems = read_scores({str(i): value for i, value in enumerate(written)}, scale)
            assert list(result.values()) == pytest.approx(read)
            assert not any(problems.values())


def test_a_number_outside_of_the_scale_leaves_the_numbers_of_its_answer_unread(subtests):
    """A score of 1 beside a score of 8 is no best score: the judge used another scale."""
    for scale, written, read, outside in [
        (Scale(), [8, 1, 0], {}, ["0"]),
        (Scale(), [0.3, 1.7, -0.2], {}, ["1", "2"]),
        (Scale(), [90, "8/10"], {"1": 0.8}, ["0"]),
        (Scale(), ["120%", "12/10", 0.5], {"2": 0.5}, ["0", "1"]),
        (TEN, [90], {}, ["0"]),
        (Scale(1, 5), [0, 5], {}, ["0"]),
    ]:
        with subtests.test(written=written):
            result, problems = read_scores({str(i): value for i, value in enumerate(written)}, scale)
            assert result == read
            assert problems[f"has a score that is not from {scale} for"] == outside


def test_what_is_no_score_is_left_out(subtests):
    for value in [None, "good", "NaN", float("nan"), float("inf"), True, [], {}, "8/0", "", "1/2/3"]:
        with subtests.test(value=value):
            result, problems = read_scores({"a": value, "b": 0.5})
            assert result == {"b": 0.5}
            assert problems["has no score that is a number for"] == ["a"]


@given(st.dictionaries(st.text(max_size=3), st.one_of(st.floats(), st.integers(), st.text(max_size=8), st.none())))
def test_a_score_is_always_from_0_to_1(given_):
    result, problems = read_scores(given_)
    assert set(result) <= set(given_)
    assert all(0 <= score <= 1 for score in result.values())
    assert set(result) == set(given_) or any(problems.values())


IDS = ["0123", "a9f0", "12e4"]


def test_names_are_matched_where_it_is_clear_which_one_is_meant(subtests):
    for written, meant in [
        (IDS, IDS),
        (["A9F0", " 0123 ", "12E4"], ["a9f0", "0123", "12e4"]),
        (["'a9f0'", '"0123"', "`12e4`"], ["a9f0", "0123", "12e4"]),
        (["[a9f0]", "<0123>"], ["a9f0", "0123"]),
        ([123, 120000.0], ["0123", "12e4"]),
        ([2, 1, 3], ["a9f0", "0123", "12e4"]),
        (["1", "2", "3"], IDS),
        ([1, 2], [None, None]),  # two of 1 to 3 or of 0 to 2
        ([0, 1, 2], [None, None, None]),
        ([1, 1, 2], [None, None, None]),
        (["a9f0", 2, 3], ["a9f0", None, None]),
        (["a9f", "a9f0!", "", None, [], True], [None] * 6),
    ]:
        with subtests.test(written=written):
            assert match_names(written, IDS) == meant


def test_names_that_differ_in_case_only_are_matched_as_written():
    assert match_names(["Goal", "GOAL", "goal"], ["Goal", "goal"]) == ["Goal", None, "goal"]


def test_turns_are_their_numbers_and_no_positions():
    assert match_names([0, 1, 2], ["0", "1", "2"]) == ["0", "1", "2"]
    assert match_names([1, 2, 3], ["0", "1", "2"]) == ["1", "2", None]


def test_the_schema_of_an_answer_requires_a_row_for_each_name():
    schema = object_schema({"scores": rows_schema(IDS, {"score": Scale(0, 10).schema})})
    rows = {name: {"score": 5} for name in IDS}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"scores": rows})
    for name in IDS:
        assert not validator.is_valid({"scores": {other: row for other, row in rows.items() if other != name}})
    assert not validator.is_valid({"scores": rows | {"ghost": {"score": 5}}})
    assert not validator.is_valid({"scores": rows | {IDS[0]: {}}})
    assert not validator.is_valid({"scores": rows | {IDS[0]: {"score": 11}}})
    read, problems = by_name(rows, IDS, "id", "score", "ids")
    assert list(read) == IDS
    assert not any(problems.values())


@given(st.text())
def test_any_text_can_be_looked_through(text):
    result = find_json(text, is_object)
    assert result is None or is_object(result)


class GrammarlessEngine:
    """An engine that can hold an answer to any JSON object, but not to a schema."""

    policy = "base"

    def __init__(self):
        self.forms = []

    async def chat(self, request):
        self.forms.append(request.form.json_schema)
        if request.form.json_schema not in (None, json.dumps(ANY_OBJECT)):
            raise SpecError([Problem("response_format", "is not supported")])
        return ChatCompletion({"role": "assistant", "content": "{}"}, "stop", [1], [2], [0.0], "base")


def test_a_local_judge_without_schemas_is_held_to_an_object():
    engine = GrammarlessEngine()
    judge = LocalModelClient(PolicyJudge(), RewardResources(Path(), TINY, engine=lambda model, adapter: engine))
    schema = {"type": "object", "properties": {"score": {"type": "number", "minimum": 0, "maximum": 1}}}
    for _ in range(2):
        answer = asyncio.run(judge.call([{"role": "user", "content": "Judge."}], schema, "", False))
        assert answer.text == "{}"
    assert [form == json.dumps(ANY_OBJECT) for form in engine.forms] == [False, True, True]
