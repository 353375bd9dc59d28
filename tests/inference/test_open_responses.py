"""Tests of the program that runs the Open Responses compliance suite, and of the policy that it serves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openai
import pytest

from tests.conformance import open_responses
from tests.conformance.open_responses import CALL, TEXT, case_of, run, served, suite_command

TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"location": {}}}}


@pytest.fixture
def suite(tmp_path, monkeypatch) -> Path:
    """A folder like a checkout, whose runner prints three results; there is no bun."""
    results = [
        {
            "id": "image-input",
            "status": "failed",
            "errors": ['HTTP 400: {"error": {"param": "input.0", "message": "no"}}'],
        },
        {"id": "multi-turn", "status": "failed", "errors": ['HTTP 500: {"error": {"param": null, "message": "oh"}}']},
        {"id": "streaming-response", "status": "passed", "duration": 5, "errors": [], "streamEvents": 9},
    ]
    tsx = tmp_path / "node_modules" / ".bin" / "tsx"
    for path in (tmp_path / "bin" / "compliance-test.ts", tmp_path / "src" / "lib" / "compliance-tests.ts", tsx):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "src" / "lib" / "compliance-tests.ts").write_text(
        '    id: "streaming-response",\n    id: "multi-turn",\n'
    )
    (tmp_path / "package.json").write_text('{"version": "0.1.0"}')
    (tmp_path / "results.json").write_text(json.dumps({"results": results}))
    tsx.write_text("#!/bin/sh\ncat results.json\nexit 1\n")
    tsx.chmod(0o755)
    monkeypatch.setattr(open_responses.shutil, "which", lambda name, path=None: "/bin/node" if name == "node" else None)
    return tmp_path


def test_results_are_passed_refused_or_failed(suite, base_dir):
    report = run(suite, str(base_dir))
    assert (report.version, report.exit_code) == ("version 0.1.0", 1)
    outcomes = [(case.name, case.outcome) for case in report.cases]
    assert outcomes == [("streaming-response", "passed"), ("multi-turn", "failed"), ("image-input", "refused")]
    assert report.cases[2].reason == "no"


@pytest.mark.parametrize("missing", ["suite", "node", "tsx"])
def test_what_is_missing_is_the_reason_to_skip(suite, monkeypatch, capsys, missing):
    folder = suite
    if missing == "suite":
        folder = suite / "none"
    elif missing == "node":
        monkeypatch.setattr(open_responses.shutil, "which", lambda name, path=None: None)
    else:
        (suite / "node_modules" / ".bin" / "tsx").unlink()
    reason = suite_command(folder)[1]
    assert missing in reason
    monkeypatch.setattr(sys, "argv", ["open_responses", "--suite", str(folder)])
    assert open_responses.main() == 0
    assert capsys.readouterr().out == f"Open Responses (scripted): skipped: {reason}\n"


def test_bun_of_the_checkout_runs_the_suite(suite, monkeypatch):
    bun = suite / "node_modules" / ".bin" / "bun"
    bun.write_text("#!/bin/sh\n")
    bun.chmod(0o755)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert suite_command(suite) == ([str(bun), "run", "bin/compliance-test.ts"], "")


def test_an_optional_case_that_the_suite_skips_is_skipped():
    case = case_of({"id": "file-search", "status": "skipped", "errors": ["File search is optional"]})
    assert (case.outcome, case.reason) == ("skipped", "File search is optional")


def test_a_result_without_errors_has_no_reason():
    assert case_of({"id": "a", "status": "passed"}).reason == ""


def test_the_scripted_policy_answers_and_calls(tmp_path):
    """Its answers are sampled, parsed and streamed by the engine."""
    with served("scripted", tmp_path) as url, openai.OpenAI(base_url=url, api_key="none", timeout=600) as client:
        events = list(client.responses.create(model="policy", input="Hello?", stream=True))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == TEXT
        assert len(deltas) > 20
        (call,) = client.responses.create(model="policy", input="Rain?", tools=[TOOL]).output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", CALL)
        kinds = [
            event.type for event in client.responses.create(model="policy", input="Rain?", tools=[TOOL], stream=True)
        ]
        assert "response.output_text.delta" not in kinds
        assert kinds.count("response.function_call_arguments.delta") == 1
