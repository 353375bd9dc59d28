"""Notifications of a run: body, retry, time limit, secrets, and the events of a run."""

from __future__ import annotations

import json
import threading

import pytest

from components.errors import GuardTriggered
from flows.execution import notification
from flows.execution.executor import Execution
from flows.execution.notification import Notifier, lacking
from flows.experiment.compose import compose
from flows.history.records import Notice, Records, RecordWriter, RunRecord
from flows.stages.base import Context
from tests.http_server import HttpServer

VARIABLE = "ESPALIER_TEST_WEBHOOK"


class Webhook(HttpServer):
    """Server that answers with the given statuses, the last one for ever; 0 waits until the end."""

    def __init__(self, *statuses):
        self.bodies, self.over, self.statuses = [], threading.Event(), list(statuses)
        super().__init__()
        self.secret_url = f"{self.url}/hook/s3cr3t-token"

    def answer(self, method, path, body, headers):
        self.bodies.append(json.loads(body))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status == 0:
            self.over.wait(30)
        return status or 200, b""

    def close(self):
        self.over.set()
        super().close()


@pytest.fixture
def webhook(monkeypatch):
    hooks = []

    def start(*statuses):
        hooks.append(Webhook(*statuses))
        monkeypatch.setenv(VARIABLE, hooks[-1].secret_url)
        return hooks[-1]

    yield start
    for hook in hooks:
        hook.close()


def settings(*lines):
    return compose(["+experiment=smoke", f"notify.url_variable={VARIABLE}", *lines])


def record():
    return RunRecord("a" * 32, "smoke", 3, 0.0, result={"success": 0.5})


def send(event, message="", step=None):
    Notifier(settings(), record()).send(event, message, step)


def test_the_body_of_an_event(webhook):
    hook = webhook(204)
    send("guard", "no episode was selected", 2)
    (body,) = hook.bodies
    assert body.pop("time").endswith("Z")
    assert body == {
        "version": 1,
        "event": "guard",
        "experiment": "smoke",
        "run": "a" * 32,
        "seed": 3,
        "step": 2,
        "message": "no episode was selected",
        "result": None,
        "text": "smoke, run aaaaaaaa: guard: no episode was selected",
    }


def test_a_failed_delivery_is_retried_once_and_then_a_warning_without_the_url(webhook, monkeypatch, caplog):
    hook = webhook(503, 200)
    send("ended")
    assert [(body["event"], body["result"]) for body in hook.bodies] == [("ended", {"success": 0.5})] * 2
    assert caplog.messages == []
    for status, words in ((500, "HTTP 500"), (0, "")):  # it does not answer at all
        hook = webhook(status)
        monkeypatch.setattr(notification, "TIMEOUT", 2.0)  # a busy machine takes a while to accept
        send("failed")
        assert len(hook.bodies) == 2
        (warning,) = [entry.getMessage() for entry in caplog.records if entry.name == notification.__name__]
        assert warning.startswith(f"cannot deliver the event failed to the webhook in {VARIABLE}: {words}")
        assert "s3cr3t" not in caplog.text
        caplog.clear()
    monkeypatch.setenv(VARIABLE, "http://127.0.0.1:9/s3cr3t")
    send("failed")
    assert "ConnectError" in caplog.text
    assert "s3cr3t" not in caplog.text


def test_only_the_events_of_the_configuration_are_sent(webhook):
    hook = webhook(200)
    notifier = Notifier(settings("notify.events=[failed]"), record())
    for event in ("ended", "guard", "failed"):
        notifier.send(event, "")
    assert [body["event"] for body in hook.bodies] == ["failed"]


def test_the_end_and_the_failure_of_a_run_are_reported(webhook):
    hook = webhook(200)
    notifier = Notifier(settings(), record())
    with notifier.watching():
        pass
    with pytest.raises(GuardTriggered), notifier.watching():
        raise GuardTriggered("stopped by a guard")
    ended, failed = (body["text"] for body in hook.bodies)
    assert ended == "smoke, run aaaaaaaa: ended: held-out success 0.500"
    assert failed.startswith("smoke, run aaaaaaaa: failed: GuardTriggered: stopped by a guard")


def test_guards_and_the_budget_are_reported_and_other_notices_are_not(webhook, tmp_path, screen):
    hook = webhook(200)
    spec = settings(f"root={tmp_path}")
    writer = RecordWriter(Records(tmp_path), record())
    execution = Execution(spec, Context.at(tmp_path), screen[0], None, tmp_path / "log", writer)
    for kind in ("no_signal", "budget", "best"):
        execution.notice(Notice(kind, 1, f"about {kind}"))
    assert [(body["event"], body["message"]) for body in hook.bodies] == [
        ("guard", "about no_signal"),
        ("budget", "about budget"),
    ]


def test_a_missing_or_invalid_url_is_reported_before_the_run_without_its_value(monkeypatch):
    spec = settings()
    for value in (None, "s3cr3t", "ftp://host/s3cr3t", "http:///s3cr3t"):
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        (message,) = lacking(spec)
        assert message.startswith(f"notify.url_variable: the environment variable {VARIABLE}")
        assert "s3cr3t" not in message
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (message,) = lacking(compose(["+experiment=smoke", "notify.prefect=true"]))
    assert "PREFECT_API_URL" in message


def test_a_prefect_event_has_the_body_as_its_payload(monkeypatch):
    events = []
    monkeypatch.setattr("prefect.events.emit_event", lambda **event: events.append(event))
    Notifier(compose(["+experiment=smoke", "notify.prefect=true"]), record()).send("approval", "deploy smoke?", 1)
    (event,) = events
    assert event["event"] == "espalier.run.approval"
    assert event["resource"] == {"prefect.resource.id": f"espalier.run.{'a' * 32}", "espalier.experiment": "smoke"}
    assert event["payload"]["message"] == "deploy smoke?"
