"""The record of a run: what other commands know of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.errors import ResourceError
from flows.history.records import Records, RunRecord, recording
from tests.flows.pretend import pretend, spec_of

CODE = Path(__file__).resolve().parents[2]


def test_a_run_is_found_by_its_id_its_name_and_as_the_latest(tmp_path):
    one = pretend(tmp_path, rounds=1)
    two = pretend(tmp_path, rounds=1, name="other")
    records = Records(tmp_path)
    assert [run.id for run in records.all()] == [two.id, one.id]
    assert records.get(one.id) == records.get(one.id[:6]) == records.get("test") == one
    assert records.get("latest") == two
    assert one.status == "FINISHED"
    assert one.ended is not None
    assert one.stage("train[1]").request["stage"] == "train"
    with pytest.raises(ResourceError, match=r"no stage 'train\[9\]'; it has: evaluate\[start\], collect\[sft\]"):
        one.stage("train[9]")


def test_a_run_that_does_not_exist_is_refused_and_the_others_named_with_their_state(tmp_path):
    run = pretend(tmp_path, rounds=1)
    for reference in ("nothing", "abc", ""):
        with pytest.raises(ResourceError, match=f"no run '{reference}'.*\n.*{run.short}.*test seed 0  finished"):
            Records(tmp_path).get(reference)
    with pytest.raises(ResourceError, match=r"no run below .* yet.*root=DIR"):
        Records(tmp_path / "elsewhere").get("nothing")
    with pytest.raises(ResourceError, match=f"'{run.id[:2]}' is too short for an id; give at least 4 characters"):
        Records(tmp_path).get(run.id[:2])
    run.status = "RUNNING"
    records = Records(tmp_path)
    records.write(run)
    assert "  killed" in records.describe(run)
    with records.hold(run.id):
        assert "  running" in records.describe(run)


def test_the_beginning_of_two_ids_is_refused(tmp_path):
    for number in range(2):
        with recording(tmp_path, RunRecord(f"abcdef{number}", "test", 0, time.time())):
            pass
    with pytest.raises(ResourceError, match="several run ids"):
        Records(tmp_path).get("abcdef")


def test_it_says_how_the_run_ended(tmp_path):
    for error, status in ((ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")):
        root = tmp_path / status
        with pytest.raises(error), recording(root, RunRecord("abcdef", "test", 0, time.time())):
            raise error
        assert Records(root).get("abcdef").status == status


def test_a_run_that_lives_is_not_dead_and_a_killed_one_is(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from flows.history.records import Records, RunRecord, recording
with recording(Path({str(tmp_path)!r}), RunRecord("abcdef", "test", 0, time.time())):
    print("here", flush=True)
    time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], cwd=CODE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "here\n"
    records = Records(tmp_path)
    assert records.alive(records.get("abcdef"))
    assert records.dead() == []
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    [dead] = records.dead()
    assert dead.id == "abcdef"
    records.close(dead)
    assert records.dead() == []
    assert records.get("abcdef").status == "KILLED"


def test_a_killed_run_is_closed_at_once_unless_prefect_has_to_be_told(tmp_path):
    from components.tracking.mlflow_tracker import Tracker
    from components.tracking.spec import TrackingSpec
    from flows.execution.tracking import close_dead

    records = Records(tmp_path)
    with Tracker.open(tmp_path, TrackingSpec(), "killed") as killed, Tracker.open(tmp_path, TrackingSpec(), "x") as now:
        records.write(RunRecord(killed.run_id, "test", 0, 1.0, prefect_flow_run="somewhere"))
        records.write(RunRecord("f" * 32, "test", 0, 2.0))
        for _ in range(2):  # as long as Prefect was not told
            assert [one.id for one in close_dead(records, now)] == [killed.run_id]
        assert now.client.get_run(killed.run_id).info.status == "KILLED"
    assert [(one.id, one.status) for one in records.all()] == [("f" * 32, "KILLED"), (killed.run_id, "RUNNING")]


OWNING = """
import os, sys
from flows.execution import tracking
from tests.flows.pretend import spec_of
spec = spec_of(sys.argv[1])
if sys.argv[2] == "parent":
    print(tracking.parent_run(tracking.Path(spec.root), spec, "swept"), flush=True)
else:
    with tracking.track(spec, [], None) as tracker:
        print(tracker.run_id, flush=True)
        sys.stdin.readline()
sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", ["run without a record", "parent"])
def test_the_next_run_closes_what_a_killed_process_owned(tmp_path, kind):
    """A run that was killed before its record was written, and the parent of a sweep, which has no record."""
    from flows.execution.tracking import OWNERS, close_dead, track

    command = [sys.executable, "-c", OWNING, str(tmp_path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        run_id = child.stdout.readline().strip()
        with track(spec_of(tmp_path), [], None) as now:
            close_dead(Records(tmp_path), now)
            assert now.client.get_run(run_id).info.status == "RUNNING", "its process is alive"
            child.kill()
            child.wait()
            close_dead(Records(tmp_path), now)
            assert now.client.get_run(run_id).info.status == "KILLED"
            assert now.client.get_run(now.run_id).info.status == "RUNNING"
    assert len(list((tmp_path / OWNERS).iterdir())) == 1, "that of this process"


def test_secrets_are_masked(tmp_path):
    run = RunRecord("abcdef", "test", 0, time.time(), spec={"api_key": "hush"}, overrides=["x.token=hush"])
    with recording(tmp_path, run):
        pass
    assert "hush" not in (tmp_path / "records" / "abcdef.json").read_text()


def test_a_broken_record_is_left_out_and_a_newer_one_refused(tmp_path, caplog):
    run = pretend(tmp_path, rounds=1)
    (tmp_path / "records" / "torn.json").write_text('{"version": 1, "id"')
    assert [one.id for one in Records(tmp_path).all()] == [run.id]
    assert "torn.json" in caplog.text
    (tmp_path / "records" / "new.json").write_text('{"version": 99}')
    with pytest.raises(ResourceError, match="newer version of Espalier"):
        Records(tmp_path).all()
