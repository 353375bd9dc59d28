"""Exports read by plain transformers and PEFT: the policy's tokens."""

from __future__ import annotations

import pytest

from tests.conformance.exports import CONVERSATIONS, MAX_TOKENS, base_model, compared, exported, run
from tests.conformance.peers.transformers_export import answers


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    return exported(base_model("small", folder), folder)


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_it_answers_with_the_tokens_of_the_policy(policy, form):
    folder, adapter = (policy.merged, None) if form == "merged" else (policy.base, str(policy.adapter))
    read = answers(str(folder), adapter, CONVERSATIONS, MAX_TOKENS)
    cases = compared(form, read, policy.answers, rounded=False)
    assert {case.outcome: case.reason for case in cases if case.outcome != "passed"} == {}
    assert len(cases) == len(CONVERSATIONS)


def test_another_model_and_another_template_fail(policy):
    read = [{"prompt": list(one.prompt_token_ids), "answer": list(one.token_ids)} for one in policy.answers]
    read[0]["answer"] = read[0]["answer"][:-1]
    read[1]["prompt"][3] += 1
    first, second, *others = compared("x", read, policy.answers, rounded=False)
    assert (first.outcome, second.outcome) == ("failed", "failed")
    assert "answer differs at token" in first.reason
    assert "prompt differs at token 3" in second.reason
    assert {case.outcome for case in others} == {"passed"}
    assert [case.outcome for case in compared("x", read, policy.answers, rounded=True)][:2] == ["refused", "failed"]


def test_readers_that_are_not_installed_are_skipped_with_a_reason(monkeypatch, policy):
    monkeypatch.setattr("tests.conformance.exports.exported", lambda base, folder: policy)
    monkeypatch.setattr(
        "tests.conformance.exports.ask", lambda *_, **__: {"version": "x 1", "answers": [{"prompt": [], "answer": []}]}
    )
    monkeypatch.setattr("tests.conformance.exports.compared", lambda *_, **__: [])
    report = run("small", None, None)
    assert [(case.outcome, case.name.split(", ")[1]) for case in report.cases] == [
        ("skipped", "llama.cpp"),
        ("skipped", "llama.cpp"),
        ("skipped", "vLLM"),
        ("skipped", "vLLM"),
    ]
