"""Tool calls read as transformers reads them, without an environment of vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.tool_call_differences import explain
from tests.conformance.tool_call_readers import Reading, ours, transformers
from tests.conformance.tool_call_texts import texts
from tests.conformance.tool_calls import compared, run


@pytest.fixture(scope="module")
def generated():
    return texts(rounds=12)


def test_generated_calls_are_read_as_they_were_written(generated):
    made = [text for text in generated if text.calls is not None]
    assert len(made) > 200
    for text in made:
        assert (ours(text.form, text.text).values or []) == list(text.calls), text


def test_transformers_reads_the_same_calls_or_the_difference_has_a_reason(generated):
    tagged = [text for text in generated if text.form == "tagged"]
    cases = compared("transformers", [(text, transformers(text.text)) for text in tagged])
    assert [case for case in cases if case.outcome == "failed"] == []
    assert len(cases) > 12
    assert {case.name: case.outcome for case in cases}["transformers: no call"] == "passed"


def test_a_difference_without_a_reason_fails(generated):
    text = next(text for text in generated if text.kind == "calls" and text.form == "tagged" and text.calls)
    wrong = Reading("", (("other", "{}"),))
    assert explain("transformers", text.text, ours("tagged", text.text), wrong) is None
    assert [case.outcome for case in compared("transformers", [(text, wrong)])] == ["failed"]


def test_without_vllm_its_parsers_are_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr("tests.conformance.tool_calls.texts", list)
    cases = run(Path("nowhere/python")).cases
    assert [(case.name, case.outcome) for case in cases] == [(n, "skipped") for n in ("hermes", "pythonic", "lfm2")]
    assert "make vllm" in cases[0].reason


def test_spellings_of_python_that_vllm_reads():
    values = {
        "(1, 2)": "[1, 2]",
        "(1,)": "[1]",
        "(1)": "1",
        "()": "[]",
        '"""two\n"lines\\""""': r'"two\n\"lines\""',
        "''''''": '""',
        r'"\033[1m\0\101"': r'"\u001b[1m\u0000A"',
    }
    read = {text: ours("pythonic", f"[f(a={text})]").calls for text in values}
    assert read == {text: (("f", f'{{"a": {value}}}'),) for text, value in values.items()}


def test_misspelled_arguments_are_no_call_without_arguments():
    assert ours("tagged", '<tool_call>{"name": "f", "argument": {"a": 1}}</tool_call>').calls is None
    assert ours("tagged", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>').calls is None
    assert ours("tagged", '<tool_call>{"name": "f"}</tool_call>').calls == (("f", "{}"),)
