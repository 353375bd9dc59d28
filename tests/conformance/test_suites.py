"""The driver of the conformance suites, without the suites."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import __main__ as driver
from tests.conformance import mcp_suite, suites
from tests.conformance.inspect_ai import EPOCHS, compare
from tests.conformance.policy import Item
from tests.conformance.report import Unavailable


def test_a_suite_without_its_data_is_skipped_with_the_variable(monkeypatch, capsys):
    monkeypatch.delenv("TAU_BENCH", raising=False)
    assert driver.main(["--only", "tau-bench", "--json"]) == 0
    [report] = json.loads(capsys.readouterr().out)["suites"]
    assert report["reason"].startswith("TAU_BENCH is not set; expected ")


def test_every_runner_of_the_folder_is_a_suite():
    runners = {path.stem for path in Path(suites.__file__).parent.glob("*.py") if "show(" in path.read_text()}
    runners -= {"report", "suites", "test_report", "test_suites"}
    assert runners | {"tau_bench"} == {suite.module for suite in suites.SUITES}
    assert len({suite.name for suite in suites.SUITES}) == len(suites.SUITES)


def test_a_runner_that_breaks_is_a_failed_case(monkeypatch):
    broken = suites.Suite("broken", "no_such_module", list)
    report = suites.run(broken)
    assert report.exit_code == 1
    assert "no_such_module" in report.cases[0].reason


def test_an_installation_without_npm_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(suites, "NPM", tmp_path)
    monkeypatch.setattr(suites.shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match="npm is not installed"):
        suites.install("npm")


def test_the_mcp_suite_is_skipped_where_it_is_not_installed(tmp_path):
    assert "npm install --prefix" in mcp_suite.report("client", tmp_path).reason


def test_tau_bench_cases_follow_its_comparisons():
    row = {"domain": "retail", "split": "test", "tasks": 115, "reward_1": 114}
    value = {"gold": [row], "recorded": {"differences": []}, "displayed": {"differences": []}}
    assert [case.outcome for case in suites.tau_report("", value).cases] == ["failed", "passed", "passed"]


PLAYED = Item("a", [{"role": "user", "content": "2 * 3"}], [{"role": "assistant", "content": "#### 6"}], "6", True)


def test_samples_of_inspect_are_compared_with_the_episode():
    for content, value, epochs, difference in (
        ("#### 6", "C", EPOCHS, ""),
        ("#### 7", "C", EPOCHS, "message 0"),
        ("#### 6", "I", EPOCHS, "success = True, Inspect False"),
        ("#### 6", "C", 1, "1 epochs"),
    ):
        messages = [*PLAYED.prompt, {"role": "assistant", "content": content}]
        sample = {"epoch": 1, "messages": messages, "scores": {"final_number": {"value": value}}}
        assert difference in compare(PLAYED, [sample] * epochs)
        assert bool(compare(PLAYED, [sample] * epochs)) == bool(difference)


def test_client_program_says_how_it_is_called():
    """Without a URL of the suite it ends with an error, not with a pass."""
    ended = subprocess.run([sys.executable, "-m", "tests.conformance.mcp_client"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "URL" in ended.stderr
