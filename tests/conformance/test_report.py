"""The common form of conformance results."""

from __future__ import annotations

import json

import pytest

from tests.conformance.report import Case, Report, cases_text, show, suites_text

CASES = [
    Case("tools_call", "passed"),
    Case("auth/basic", "refused", "no OAuth"),
    Case("sse-retry", "failed", "reconnected too early\n" + "at line 1 " * 40),
]
REPORT = Report("MCP client", "0.1.16", "python -m tests.conformance.mcp_suite", CASES)


def test_a_failed_case_decides_the_exit_code(capsys):
    assert show(REPORT, as_json=False) == 1
    assert show(Report("MCP client", "0.1.16", "", CASES[:2]), as_json=False) == 0
    assert "3 cases: 1 passed, 1 failed, 1 refused, 0 skipped" in capsys.readouterr().out


def test_json_holds_whole_reasons_and_is_read_again(capsys):
    show(REPORT, as_json=True)
    value = json.loads(capsys.readouterr().out)
    assert (value["passed"], value["failed"], value["refused"], value["skipped"]) == (1, 1, 1, 0)
    assert value["cases"][2]["reason"] == CASES[2].reason
    assert Report.from_json(value) == REPORT


def test_a_suite_that_cannot_run_says_why():
    report = Report("MCP client", "", "", reason="node is not on the PATH")
    assert cases_text(report) == "MCP client: skipped: node is not on the PATH"
    assert "skipped: node is not on the PATH" in suites_text([report])
    assert Report.from_json(report.json()).exit_code == 0


def test_the_table_of_suites_lists_what_did_not_pass():
    lines = suites_text([REPORT]).splitlines()
    assert lines[1].split()[:7] == ["MCP", "client", "0.1.16", "3", "1", "1", "1"]
    assert "  refused auth/basic: no OAuth" in lines
    assert not any("tools_call" in line for line in lines)


@pytest.mark.parametrize(("outcome", "expected"), [("ok", "expected one of passed"), ("failed", "requires a reason")])
def test_an_unknown_outcome_and_a_missing_reason_are_rejected(outcome, expected):
    with pytest.raises(ValueError, match=expected):
        Case("ping", outcome)
