"""Queue of writes to MLflow: delayed writes are sent later, in order, once."""

from __future__ import annotations

import threading
import time

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from components.errors import ResourceError
from components.tracking import outbox
from components.tracking.outbox import Outbox


class Server:
    """Fake server that records words while it is up."""

    def __init__(self):
        self.up = True
        self.heard: list[str] = []
        self.asked = 0

    def hear(self, word: str):
        def work() -> None:
            self.asked += 1
            if not self.up:
                raise MlflowException("connection refused")
            self.heard.append(word)

        return work


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def box(monkeypatch):
    monkeypatch.setattr(outbox, "PAUSE", 0.0)
    return Outbox("http://mlflow")


def test_in_order_and_once(server, box, caplog):
    box.put(server.hear("a"))
    box.flush()
    server.up = False
    for word in "bcd":
        box.put(server.hear(word))
    box.flush()
    assert (server.heard, len(box)) == (["a"], 3)
    server.up = True
    box.put(server.hear("e"))
    box.flush()
    assert (server.heard, len(box)) == (list("abcde"), 0)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "MLflow at http",
        "MLflow at http",
    ]
    assert "is unreachable" in caplog.text
    assert "is reachable again" in caplog.text


def test_unreachable_server_is_not_retried_during_the_pause(server, box, monkeypatch):
    monkeypatch.setattr(outbox, "PAUSE", 100.0)
    server.up = False
    for word in "abc":
        box.put(server.hear(word))
        box.flush()
    assert server.asked == 1
    server.up = True
    box.drain(0)
    assert server.heard == list("abc")


def test_drain_times_out_with_advice(server, box):
    server.up = False
    box.put(server.hear("a"))
    with pytest.raises(
        ResourceError, match=r"timed out after 0 s .* http://mlflow \(connection refused\).*same command"
    ):
        box.drain(0.1)


def test_rejected_write_is_raised_and_not_retried(server, box):
    def wrong() -> None:
        raise MlflowException("no such thing", INVALID_PARAMETER_VALUE)

    for meet in (box.flush, lambda: box.drain(10), lambda: put_later(box, server.hear("late"))):
        box.put(wrong)
        with pytest.raises(MlflowException, match="no such thing"):
            meet()
    box.put(server.hear("a"))
    box.flush()
    assert server.heard == ["a"]


def put_later(box, work):
    """Put work after all earlier work was tried."""
    while len(box) or box._in_background:
        time.sleep(0.001)
    box.put(work)


def test_a_stage_does_not_wait_for_mlflow(server, box):
    go = threading.Event()
    box.put(lambda: go.wait(600))
    box.put(server.hear("a"))  # returns although the first write has not ended
    assert server.heard == []
    go.set()
    box.drain(600)
    assert server.heard == ["a"]


def test_full_disk_is_retried(server, box):
    def full() -> None:
        if not server.heard:
            raise OSError(28, "No space left on device")

    box.put(full)
    box.flush()
    assert len(box) == 1
    server.heard.append("made room")
    box.drain(1)
    assert len(box) == 0


def test_two_threads_send_each_write_once_and_in_order(box):
    sent, begun, go = [], threading.Event(), threading.Event()

    def slow():
        begun.set()
        go.wait(600)
        sent.append(0)

    box.put(slow)
    begun.wait(600)
    ending = threading.Thread(target=lambda: (box.put(lambda: sent.append(1)), box.drain(10)))
    ending.start()
    time.sleep(0.05)
    go.set()
    ending.join(600)
    assert sent == [0, 1]
    assert not box


def test_interrupted_write_is_sent_at_the_end(box):
    attempts = []

    def interrupted():
        attempts.append("try")
        if len(attempts) == 1:
            raise KeyboardInterrupt

    box._waiting.append(interrupted)  # of the thread that ends the run, in which signals arrive
    with pytest.raises(KeyboardInterrupt):
        box.flush()
    box.drain(10)
    assert attempts == ["try", "try"]
