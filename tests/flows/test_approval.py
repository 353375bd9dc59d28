"""Human approval before a deployment: in Prefect or in the terminal, and the record of a rejection."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from components.errors import ResourceError, WaitTimeout
from components.specs import validate
from flows.experiment.spec import ExperimentSpec
from flows.recipes.outcome import RunOutcome
from flows.recipes.run import Run
from flows.release import approval
from tests.flows.test_online_rl import DATA, Recorder
from tests.flows.waiting import until

TABLE = [
    ["policy", "success", "reward", "turns"],
    ["start", "0.250 [0.100, 0.400]", "0.3", "2"],
    ["after GRPO", "0.750 [0.600, 0.900]", "0.8", "2"],
]


def spec(tmp_path, **deploy):
    return validate(ExperimentSpec, {**DATA, "root": str(tmp_path), "deploy": {"approve": True, **deploy}})


# --- where it stands in a run -----------------------------------------------------------------------------------------


def test_it_is_asked_last_and_a_no_leaves_out_nothing_but_the_deployment(tmp_path):
    run = Recorder(tmp_path)
    asked = []

    def approve(outcome, request):
        asked.append((list(outcome.evaluations), request.stage))
        return "rejected: too talkative"

    labels = list(run.keys)
    run.keys.clear()
    run.notices.clear()
    outcome = Run(spec(tmp_path), run, on_notice=run.notices.append, approve=approve).execute()
    assert asked == [(["start", "sft", "final"], "deploy")]
    assert list(run.keys) == labels[:-1]
    assert (outcome.export, outcome.decisions) == (None, ["rejected: too talkative"])
    assert [(notice.kind, notice.message) for notice in run.notices] == [("rejected", "rejected: too talkative")]


def test_it_is_in_no_key(tmp_path):
    plain = Recorder(tmp_path)
    assert Recorder(tmp_path, deploy={"approve": True, "approve_timeout": 5}).keys == plain.keys


def test_an_export_that_is_there_is_not_asked_for_again(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(approval, "find_stage", lambda request, context: found[0])
    monkeypatch.setattr(approval, "rows", lambda *_: TABLE)
    monkeypatch.setattr(approval, "_in_prefect", lambda: False)
    monkeypatch.setattr(approval, "ask_in_terminal", lambda *_: "it is worse")
    closed = []
    context = SimpleNamespace(warm=SimpleNamespace(close=lambda: closed.append(True)))
    events = []
    notifier = SimpleNamespace(send=lambda event, message, step: events.append((event, message, step)))
    console = SimpleNamespace(line=print)
    execution = SimpleNamespace(spec=spec(tmp_path), context=context, console=console, notifier=notifier)
    outcome = SimpleNamespace(last_step=4)
    approve = approval.asker(execution)
    found.append("an export")
    assert approve(outcome, None) is None
    assert closed == []
    assert events == []
    found[0] = None
    assert approve(outcome, None).startswith("the deployment was rejected: it is worse; finished stages stay cached")
    assert closed == [True]
    ((event, message, step),) = events
    assert (event, step) == ("approval", 4)
    assert message.startswith("deploy ")


def test_the_person_sees_the_evaluations(tmp_path):
    interval = {"mean": 0.5, "low": 0.25, "high": 0.75}
    (tmp_path / "summary.json").write_text(json.dumps(dict.fromkeys(("success", "reward", "turns"), interval)))
    run = Recorder(tmp_path)
    cell = "0.500 [0.250, 0.750]"
    assert approval.rows(run.spec, run.outcome) == [
        ["policy", "success", "reward", "turns"],
        *([title, cell, cell, cell] for title in ("start", "after SFT", "after GRPO")),
    ]
    rows = {name: Mock(metrics={"loss": loss, "rows": 8.0}) for name, loss in (("before", 2.5), ("after", 1.0))}
    measured = RunOutcome(validations=rows)
    assert approval.rows(run.spec, measured) == [
        ["policy", "loss"],
        ["before training", "2.500"],
        ["after training", "1.000"],
    ]


# --- in the terminal --------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    """Provide text as terminal input."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "w") as typed:
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.delenv("PREFECT_API_URL", raising=False)
        yield lambda text: (typed.write(text), typed.flush())


def test_the_terminal_asks(terminal, screen, tmp_path):
    console, stream = screen
    for typed, reason in {
        "yes\n": None,
        "Y\n": None,
        "no, it is too slow\n": "it is too slow",
        "n\n": "",
        "maybe\nyes\n": None,
    }.items():
        terminal(typed)
        assert approval.ask_in_terminal(console, spec(tmp_path), TABLE) == reason
    for words in ("after GRPO", "0.750 [0.600, 0.900]", "Deploy test? Answer yes, or no and the reason:"):
        assert words in stream.getvalue()
    words = r"no approval in the terminal within 0\.1 s \(deploy.approve_timeout\); finished"
    with pytest.raises(WaitTimeout, match=words):
        approval.ask_in_terminal(screen[0], spec(tmp_path, approve_timeout=0.1), TABLE)


def test_without_a_terminal_and_without_a_server_it_is_refused_before_the_run(terminal, tmp_path, monkeypatch):
    with pytest.raises(ResourceError, match=r"deploy\.approve = true: approval needs a terminal"):
        approval.check(spec(tmp_path))
    approval.check(spec(tmp_path, approve=False))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    approval.check(spec(tmp_path))


# --- in Prefect -------------------------------------------------------------------------------------------------------


@pytest.fixture
def paused(prefect_server, monkeypatch):
    """Ask inside a flow; `answer` gets the client, the paused flow run and its form."""
    from prefect import flow, get_client
    from prefect.context import FlowRunContext
    from prefect.settings import temporary_settings

    monkeypatch.setattr(approval, "POLL", 0.2)

    def run(asked, answer):
        running, failed = [], []
        settings = prefect_server.settings()

        @flow(name="asks")
        def asks():
            running.append(FlowRunContext.get().flow_run.id)
            return approval.ask_in_prefect(asked, TABLE)

        def person():
            try:
                with temporary_settings(settings), get_client(sync_client=True) as client:
                    found, keys, read = [], {}, client.read_flow_run_input

                    def is_asked() -> list:
                        with suppress(Exception):  # it has not begun, or its form is not written yet
                            keys.update(client.read_flow_run(running[0]).state.state_details.run_input_keyset or {})
                            found[:] = [read(running[0], keys[name]) for name in ("schema", "description")]
                        return found

                    until(is_asked)
                    answer(client, running[0], *map(json.loads, found))
            except BaseException as error:  # noqa: BLE001  told by the test
                failed.append(error)

        thread = threading.Thread(target=person)
        with temporary_settings(settings):
            thread.start()
            try:
                return asks()
            finally:
                thread.join(600)
                assert failed == []

    return run


def test_a_person_answers_in_prefect_or_nobody_does(paused, tmp_path):
    seen, decisions = [], [{"decision": "reject", "reason": "too slow"}, {"decision": "accept"}]

    def answer(client, flow_run_id, form, about):
        seen.append((form["properties"]["decision"]["enum"], form["required"], about))
        client.resume_flow_run(flow_run_id, run_input=decisions.pop(0))

    assert paused(spec(tmp_path), answer) == "too slow"
    assert paused(spec(tmp_path), answer) is None
    choices, required, about = seen[0]
    assert (choices, required) == (["accept", "reject"], ["decision"])
    assert "| after GRPO | 0.750 [0.600, 0.900] | 0.8 | 2 |" in about
    with pytest.raises(WaitTimeout, match=r"no approval in Prefect within 1\.0 s .*; finished stages stay cached"):
        paused(spec(tmp_path, approve_timeout=1), lambda *_: None)
