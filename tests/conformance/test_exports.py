"""Exports read by plain transformers and PEFT: the policy's tokens."""

from __future__ import annotations

import math

import pytest
from safetensors.torch import load_file

from components.deployment.answers import TOLERANCE
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
    cases = compared(form, read, policy.answers)
    assert {case.outcome: case.reason for case in cases if case.outcome != "passed"} == {}
    assert len(cases) == len(CONVERSATIONS)


def test_another_model_and_another_template_fail(policy):
    read = [{"prompt": list(one.prompt_token_ids), "answer": list(one.token_ids)} for one in policy.answers]
    read[0]["answer"] = read[0]["answer"][:-1]
    read[1]["prompt"][3] += 1
    first, second, *others = compared("x", read, policy.answers)
    assert (first.outcome, second.outcome) == ("failed", "failed")
    assert "answer differs at token" in first.reason
    assert "prompt differs at token 3" in second.reason
    assert {case.outcome for case in others} == {"passed"}


@pytest.mark.parametrize(
    ("tolerance", "outcomes"), [(0.0, ["failed"] * 2), (0.3, ["refused", "failed"]), (math.inf, ["refused"] * 2)]
)
def test_only_another_token_of_nearly_equal_probability_is_due_to_rounding(policy, tolerance, outcomes):
    read = [{"prompt": list(one.prompt_token_ids), "answer": list(one.token_ids)} for one in policy.answers[:2]]
    (best, high), (second, low) = policy.answers[0].likeliest[4][:2]
    assert policy.answers[0].token_ids[4] == best
    read[0]["answer"][4] = second
    read[1]["answer"][4] = next(token for token in range(400) if token not in dict(policy.answers[1].likeliest[4]))
    tolerance = high - low + 1e-6 if tolerance == 0.3 else tolerance
    first, other = compared("x", read, policy.answers[:2], tolerance=tolerance)
    assert [first.outcome, other.outcome] == outcomes
    if tolerance:
        assert f"4 of {len(policy.answers[0].token_ids)} tokens equal" in first.reason
        assert "not among the policy's likeliest" in other.reason


def test_exports_in_bfloat16_differ_by_no_more_than_rounding(tmp_path):
    policy = exported(base_model("small", tmp_path, "bfloat16"), tmp_path, "bfloat16")
    assert {str(weight.dtype) for weight in load_file(policy.merged / "model.safetensors").values()} == {
        "torch.bfloat16"
    }
    for folder, adapter in ((policy.merged, None), (policy.base, str(policy.adapter))):
        read = answers(str(folder), adapter, CONVERSATIONS, MAX_TOKENS)
        cases = compared("x", read, policy.answers, tolerance=TOLERANCE["bfloat16"])
        assert [case for case in cases if case.outcome == "failed"] == []


def test_readers_that_are_not_installed_are_skipped_with_a_reason(monkeypatch, policy):
    monkeypatch.setattr("tests.conformance.exports.exported", lambda base, folder, dtype: policy)
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
