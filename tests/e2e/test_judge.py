"""A judge that is paid, in a whole run: it stops at a budget, it is killed, and goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.databases import give_databases
from tests.e2e.test_smoke import Place
from tests.rewards.judge_server import Reply, judge_server

pytestmark = pytest.mark.timeout(1800)
PRICE = "reward.model.price={input: 1000.0, output: 1000.0}"


def questions(server):
    """How often each question was asked."""
    return Counter(json.dumps(one.body["messages"]) for one in server.requests)


def test_a_run_stops_at_a_budget_is_killed_and_goes_on_and_pays_for_no_question_twice(tmp_path, command, finished):
    place = Place(tmp_path)
    give_databases(place.root)
    hold: list[int] = []

    def meet(asked):
        return Reply(after=120.0 if hold and asked.number >= hold[0] else 0.0)

    with judge_server(meet, rate=lambda name, text: (len(text) % 97) / 97) as server:
        line = ("reward=ruler", f"reward.model.url={server.url}", "reward.model.model=judge", PRICE)
        line = (*line, "judge.concurrency=2", "reward.model.timeout=300")

        code, out, errors = command(*place.overrides(*line, "judge.budget=0.9"))
        assert (code, out) == (1, "")
        assert "BudgetExceeded: judge.budget: " in errors
        assert "the same command with a higher judge.budget resumes" in errors
        assert "Traceback" not in errors
        paid = len(server.requests)
        assert paid > 0

        hold.append(paid + 3)
        killed = place.start(*line)
        deadline = time.monotonic() + 600
        while len(server.requests) < paid + 5:  # two are under way, three were answered
            assert killed.poll() is None, killed.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
        lost = {json.dumps(one.body["messages"]) for one in server.requests[paid + 3 :]}
        hold.clear()

        done = finished(place, *line)
        assert {question for question, times in questions(server).items() if times > 1} <= lost
        calls = len(server.requests)
        again = finished(place, *line)
        assert len(server.requests) == calls
    assert set(again.result["stages"].values()) == {"cached"}
    assert again.result["cost"] == 0

    # What it cost, in the last line, in MLflow, in the report and on the console.
    assert done.result["cost"] > 0
    assert f"cost {done.result['cost']:.4g}" in done.errors
    client = place.mlflow()
    metrics = client.get_run(done.result["run_id"]).data.metrics
    for name in ("spent", "calls", "kept_answers", "cost", "reward"):
        assert f"judge/{name}" in metrics
    assert metrics["cost/judge"] == pytest.approx(metrics["judge/spent"])
    assert metrics["cost/total"] == pytest.approx(done.result["cost"], abs=1e-5)
    report = Path(done.result["report"]).read_text()
    assert "<th>Cost</th>" in report
    assert (place.root / "answers" / "answers.sqlite").is_file()
