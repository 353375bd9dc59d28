"""Tool calls read as transformers reads them, and as they were written, without an environment of vLLM."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from components.deployment.vllm_parsers import TOOL_CALLS as VLLM_PARSERS
from components.trajectories.call_forms import FORMS
from tests.conformance.tool_call_differences import explain
from tests.conformance.tool_call_forms import WRITERS, form_texts
from tests.conformance.tool_call_readers import VLLM, Reading, ours, transformers
from tests.conformance.tool_call_texts import texts
from tests.conformance.tool_calls import compared, run


@pytest.fixture(scope="module")
def generated():
    return [*texts(rounds=12), *chain.from_iterable(form_texts(form, rounds=6) for form in WRITERS)]


def test_each_form_has_a_writer_and_a_parser_of_vllm():
    assert {*WRITERS, "tagged_json", "harmony"} == FORMS.keys() == VLLM_PARSERS.keys()


def test_generated_calls_are_read_as_they_were_written(generated):
    made = [text for text in generated if text.calls is not None]
    assert len({text.form for text in made}) == len({*WRITERS, "tagged_json", "pythonic"})
    assert [text for text in made if (ours(text.form, text.text).values or []) != list(text.calls)] == []


def test_transformers_reads_the_same_calls_or_the_difference_has_a_reason(generated):
    tagged = [text for text in generated if text.form == "tagged_json"]
    cases = compared("transformers", [(text, transformers(text.text)) for text in tagged])
    assert [case for case in cases if case.outcome == "failed"] == []
    assert len(cases) > 12
    assert {case.name: case.outcome for case in cases}["transformers: no call"] == "passed"


def test_a_difference_without_a_reason_fails(generated):
    text = next(text for text in generated if text.kind == "calls" and text.form == "tagged_json" and text.calls)
    wrong = Reading("", (("other", "{}"),))
    assert explain("transformers", text.text, ours("tagged_json", text.text), wrong) is None
    assert [case.outcome for case in compared("transformers", [(text, wrong)])] == ["failed"]


def test_without_vllm_its_parsers_are_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr("tests.conformance.tool_calls.texts", list)
    monkeypatch.setattr("tests.conformance.tool_calls.WRITERS", {})
    cases = run(Path("nowhere/python")).cases
    assert [(case.name, case.outcome) for case in cases] == [(name, "skipped") for name in VLLM]
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
    assert ours("tagged_json", '<tool_call>{"name": "f", "argument": {"a": 1}}</tool_call>').calls is None
    assert ours("tagged_json", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>').calls is None
    assert ours("tagged_json", '<tool_call>{"name": "f"}</tool_call>').calls == (("f", "{}"),)
