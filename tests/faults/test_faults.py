"""Faults, injected for real into a run in processes of its own. docs/concepts/reliability.md lists their effects."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flows.history.records import Records
from tests.e2e.test_smoke import FinishedRun, Place
from tests.faults import kill
from tests.inference.faulty import EMPTY, Line, answer, cut, status

pytestmark = pytest.mark.timeout(1800)
SMALL = ("deploy=none", "rounds=1")


def log_of(place: Place) -> str:
    return "".join(path.read_text() for path in sorted((place.root / "logs").glob("smoke-*.log")))


def until(condition: Callable[[], object], process: subprocess.Popen, limit: float = 600.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(process: subprocess.Popen, limit: float = 500.0) -> FinishedRun:
    out, errors = process.communicate(timeout=limit)
    assert process.returncode == 0, errors
    return FinishedRun(json.loads(out.splitlines()[-1]), out.splitlines(), errors)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> FinishedRun:
    return Place(tmp_path_factory.mktemp("undisturbed")).run(*SMALL)


def test_killed_at_random_moments_it_ends_in_the_same_bytes(tmp_path):
    small = ["rounds=1", "evaluate.scenarios=8", "collect.scenarios=4", "algorithm.epochs=1", "agent.max_tokens=30"]
    found = kill.run(2, 1, tmp_path, small)
    assert found["kills"] == 2
    wrong = ("stages_that_differ", "episodes_not_as_declared", "stages_made_twice", "processes_left")
    assert {name: found[name] for name in wrong} == dict.fromkeys(wrong, 0)


@pytest.mark.slow
def test_a_prefect_server_that_dies_costs_a_warning(tmp_path, undisturbed):
    place = Place(tmp_path)
    process = place.start(*SMALL)
    until(lambda: "Beginning flow run" in log_of(place), process)
    for one in psutil.Process(process.pid).children():
        if "flows.orchestration.server_process" in one.cmdline():
            one.kill()
    done = ended(process)
    assert done.result["policy_digest"] == undisturbed.result["policy_digest"]
    assert "the Prefect server did not get all of its states" in done.errors
    assert "Traceback" not in done.errors
    assert set(place.run(*SMALL).result["stages"].values()) == {"cached"}


@pytest.mark.slow
def test_an_engine_that_fails_all_the_time_costs_time_and_no_episode(tmp_path, undisturbed):
    from components.inference.app import AppOptions
    from components.inference.server import ModelServer
    from components.inference.transformers.engine import TransformersEngine
    from components.models.spec import ModelSpec
    from components.models.weights import prepare

    folder = prepare(ModelSpec(name="tiny", source="random"), tmp_path / "models")
    engine = TransformersEngine(folder, max_length=2048, device="cpu")
    often = [None, status(500), None, status(429, Retry_After="0.1"), None, cut, None]
    faults = [*often, EMPTY, *often, *often, answer("<html>"), *often]
    place = Place(tmp_path)
    with (
        ModelServer(engine, "tiny", AppOptions(adapters=place.root)) as server,
        Line(server.url, faults * 1000) as line,
    ):
        remote = ("inference=remote", f"inference.url={line.url}", "inference.model=tiny", "inference.retry_for=60")
        done = place.run(*SMALL, *remote)
        assert len(line.seen) > 50
    assert done.result["episodes"] == undisturbed.result["episodes"]
    assert all(said in log_of(place) for said in ("HTTP 500", "HTTP 429", "the connection broke", "an empty answer"))
    [record] = Records(place.root).all()
    played = [one for one in record.stages if one.label in ("evaluate[start]", "collect[1]", "evaluate[final]")]
    from components.artifacts import Store

    for one in played:
        artifact = Store(place.root / "artifacts").find(one.key)
        assert artifact is not None
        assert artifact.metrics["failed"] == 0
    # The server is gone: what is finished needs no engine, what is not says so.
    assert set(place.run(*SMALL, *remote).result["stages"].values()) == {"cached"}
    process = place.start(*SMALL, *remote, "seed=1", "inference.retry_for=1")
    _, errors = process.communicate(timeout=1500)
    assert process.returncode == 2
    assert f"inference.url: {line.url} is no server that can be used: the connection broke" in errors
    assert "Traceback" not in errors


@contextlib.contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[subprocess.Popen]:
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "files"),
    ]
    with open(folder / "server.log", "ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 600
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            assert process.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()  # noqa: PT018
            time.sleep(0.2)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_an_mlflow_server_that_is_away_for_a_while_hears_everything_later(tmp_path, undisturbed):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = Place(tmp_path)
    overrides = (*SMALL, f"tracking.uri=http://127.0.0.1:{port}")
    with mlflow_server(tmp_path, port):
        process = place.start(*overrides)
        until(lambda: "evaluate[start] ran" in log_of(place), process)
    until(lambda: "is unreachable; the run continues" in log_of(place), process)
    until(lambda: "evaluate[final] ran" in log_of(place), process)
    time.sleep(20)  # now the run waits at its end
    with mlflow_server(tmp_path, port):
        done = ended(process)
        assert done.result["policy_digest"] == undisturbed.result["policy_digest"]
        assert "is reachable again" in done.errors
        from components.tracking.store import connect

        client = connect(f"http://127.0.0.1:{port}", tmp_path)
        run = client.get_run(done.result["run_id"])
        assert run.info.status == "FINISHED"
        steps = {metric.step for metric in client.get_metric_history(run.info.run_id, "eval/success")}
        assert steps == {-1, 0, 1}
        listed = {file.path for file in client.list_artifacts(run.info.run_id, "stages")}
        assert len(listed) == len(done.result["stages"])


@pytest.mark.slow
def test_a_full_disk_is_said_and_the_same_command_goes_on(tmp_path, undisturbed):
    place = Place(tmp_path)
    place.root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(place.root)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small filesystem here: {mounted.stderr}")
    try:
        process = place.start(*SMALL)
        until(lambda: "evaluate[start] ran" in log_of(place), process)
        filler = place.root / "filler"
        with open(filler, "wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * (1 << 20))
        _, errors = process.communicate(timeout=1500)
        assert process.returncode == 1, errors
        assert "no space left on the disk of root" in errors
        assert "Traceback" not in errors
        assert place.processes() == []
        filler.unlink()
        done = place.run(*SMALL)
        assert done.result["policy_digest"] == undisturbed.result["policy_digest"]
        assert done.result["stages"]["evaluate[start]"] == "cached"
    finally:
        subprocess.run(["umount", "-l", str(place.root)], check=False)


@pytest.mark.slow
def test_a_parent_that_dies_takes_its_stage_with_it(tmp_path):
    place = Place(tmp_path)
    process = place.start(*SMALL, "compute=process", "agent.max_tokens=120", "evaluate.concurrency=1")
    until(lambda: list(place.root.glob("artifacts/.scratch/*/episodes-*.parquet")), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 600
    while place.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert place.processes() == []


@pytest.mark.slow
def test_points_that_run_at_the_same_time_make_what_they_share_once(tmp_path):
    """Each in a process of its own; they wait for each other and say so."""
    place = Place(tmp_path)
    rates = [f"{number}e-5" for number in range(1, 9)]
    processes = [place.start(*SMALL, f"algorithm.learning_rate={rate}") for rate in rates]
    results = [ended(process) for process in processes]
    assert len({done.result["policy_digest"] for done in results}) == len(rates)
    made: dict[str, int] = {}
    for done in results:
        for label, how in done.result["stages"].items():
            made[label] = made.get(label, 0) + (how == "ran")
    different = {"train[1]", "evaluate[final]"}
    assert {label: count for label, count in made.items() if label not in different} == {
        label: 1 for label in made if label not in different
    }
    assert {made[label] for label in different} == {len(rates)}
    assert any("waiting for" in done.errors and "which process" in done.errors for done in results)


@pytest.mark.slow
def test_a_killed_run_is_closed_by_the_next_one(tmp_path):
    place = Place(tmp_path)
    process = place.start(*SMALL)
    until(lambda: "evaluate[start] ran" in log_of(place), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    [dead] = Records(place.root).dead()
    done = place.run(*SMALL)
    assert done.result["stages"]["evaluate[start]"] == "cached"
    client = place.mlflow()
    assert client.get_run(dead.id).info.status == "KILLED"
    assert client.get_run(done.result["run_id"]).info.status == "FINISHED"
    assert Records(place.root).get(dead.id).status == "KILLED"
    assert Records(place.root).dead() == []
    with contextlib.closing(sqlite3.connect(place.root / "prefect" / "prefect.db")) as database:
        flows = dict(database.execute("select id, state_name from flow_run").fetchall())
    assert sorted(flows.values()) == ["Completed", "Crashed"]
    before, after = place.states()
    assert set(before.values()) <= {"Completed", "Crashed"}
    assert set(after.values()) <= {"Completed", "Cached"}


def test_kills_are_dealt_to_all_stages_alike():
    cards = kill.Cards(["start", "collect[1]", "train[1]", "deploy"], random.Random(0))
    hands = [cards.deal(3) for _ in range(4)]
    assert all(len(set(hand)) == 3 and hand == sorted(hand, key=cards.names.index) for hand in hands)
    assert Counter(card for hand in hands for card in hand) == dict.fromkeys(cards.names, 3)


def test_what_a_kill_accounts_for():
    labels = ["evaluate[start]", "collect[1]", "judge[1]", "train[1]", "deploy"]
    assert kill.unexplained(labels, {"evaluate[start]", "collect[1]"}) == []
    assert kill.unexplained(labels[1:], {"collect[1]"}) == []
    assert kill.unexplained(["evaluate[start]", "deploy"], {"evaluate[start]"}) == []
    assert kill.unexplained(["evaluate[start]", "train[1]"], {"evaluate[start]"}) == ["train[1]"]
    assert kill.unexplained(["collect[1]", "train[1]"], {"train[1]"}) == ["collect[1]", "train[1]"]


def test_a_kill_beside_a_training_falls_into_the_collecting_too():
    labels = ["collect[1]", "train[1]", "collect[2]", "train[2]"]

    def log(*done: str) -> str:
        return "\n".join(["Beginning flow run", *(f"flows.execution.executor: {one} ran in 1 s" for one in done)])

    assert kill.hit_by(log("collect[1]"), labels, overlap=True) == {"train[1]", "collect[2]"}
    assert kill.hit_by(log("collect[1]"), labels, overlap=False) == {"train[1]"}
    assert kill.hit_by(log("collect[1]", "collect[2]"), labels, overlap=True) == {"train[1]"}
    assert kill.at_work(log("collect[1]", "collect[2]", "train[1]"), labels) == "train[2]"
