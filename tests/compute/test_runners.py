"""Stages in subprocesses: results, errors, and no orphaned processes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from components.compute.runners import (
    KeptProcessRunner,
    LocalRunner,
    ProcessRunner,
    RunnerStopped,
    StageProcess,
    StageResult,
    error_from_json,
    error_to_json,
)
from components.errors import EspalierError, Problem, SpecError, TooManyFailures, WaitTimeout


def runner(tmp_path, code, **options):
    """Return a runner whose command is a small script instead of `python -m flows.stage`."""
    script = tmp_path / "stage.py"
    script.write_text("import json, sys, time\ndef say(**line): print(json.dumps(line), flush=True)\n")
    with script.open("a") as file:
        file.write(textwrap.dedent(code))
    return ProcessRunner(StageProcess(tmp_path, tmp_path / "log.txt", **options), [sys.executable, str(script)])


def test_the_local_runner_calls_the_function():
    done = StageResult("k", "d", "ran")
    assert LocalRunner(lambda request, on_event: done).run({}, print) is done


def test_a_process_gets_the_request_and_reports(tmp_path):
    code = """
        request = json.load(open(sys.argv[sys.argv.index("--request") + 1]))
        say(progress=[1, 2, {"loss": 0.5}])
        print("a note", file=sys.stderr)
        say(key=request["stage"], digest=sys.argv[-1].removeprefix("root="), status="ran")
    """
    events = []
    result = runner(tmp_path, code).run({"stage": "train"}, events.append)
    assert result == StageResult("train", str(tmp_path), "ran")
    assert events == [{"progress": [1, 2, {"loss": 0.5}]}]
    assert "a note" in (tmp_path / "log.txt").read_text()


def test_error_keeps_its_type_across_processes(tmp_path):
    error = json.dumps(error_to_json(TooManyFailures("3 of 8 failed")))
    with pytest.raises(TooManyFailures, match="3 of 8 failed"):
        runner(tmp_path, f"say(error=json.loads({error!r}))").run({}, print)


@pytest.mark.parametrize(
    "error", [WaitTimeout("late"), SpecError([Problem("a.b", "is wrong", "c")]), EspalierError("x")]
)
def test_errors_survive_json(error):
    again = error_from_json(json.loads(json.dumps(error_to_json(error))))
    assert (type(again), str(again)) == (type(error), str(error))


def test_unknown_error_keeps_its_name_and_message():
    again = error_from_json({"type": "ZeroDivisionError", "message": "by zero"})
    assert (type(again), str(again)) == (EspalierError, "ZeroDivisionError: by zero")


def test_a_process_that_dies_is_an_error_that_names_its_log(tmp_path):
    with pytest.raises(EspalierError, match=r"train ended with exit code 3.*log\.txt"):
        runner(tmp_path, "sys.exit(3)").run({"stage": "train"}, print)
    with pytest.raises(EspalierError, match="by signal 9"):
        runner(tmp_path, "import os; os.kill(os.getpid(), 9)").run({"stage": "train"}, print)


def test_a_process_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(WaitTimeout, match="train timed out after 1 s"):
        runner(tmp_path, "time.sleep(60)", limit=1.0).run({"stage": "train"}, print)


def test_an_interrupt_ends_the_process(tmp_path):
    pids = []

    def interrupt(event):
        pids.append(event["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner(tmp_path, "import os; say(pid=os.getpid()); time.sleep(60)").run({}, interrupt)
    assert not psutil.pid_exists(pids[0])


def test_stop_from_another_thread_lets_the_process_clean_up(tmp_path):
    code = """
        import pathlib, signal
        from components.compute.lifeline import watch_parent
        watch_parent()
        def put_away(*_): pathlib.Path(sys.argv[0]).with_name("away").touch(); sys.exit(130)
        signal.signal(signal.SIGTERM, put_away)
        say(progress=[0, 1])
        time.sleep(60)
    """
    running = runner(tmp_path, code, environment={**os.environ, "PYTHONPATH": os.getcwd()})
    thread = []

    def stop(event):
        thread.append(threading.Thread(target=running.stop))
        thread[0].start()

    with pytest.raises(RunnerStopped):
        running.run({}, stop)
    thread[0].join()
    assert (tmp_path / "away").exists()
    with pytest.raises(RunnerStopped):
        running.run({}, print)  # nothing begins any more


def test_reused_process_takes_several_requests(tmp_path):
    script = tmp_path / "stage.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, subprocess, sys
            assert "--requests" in sys.argv
            rank = "import time; from components.compute.lifeline import watch_parent; watch_parent(on_line=None); "
            pid = subprocess.Popen([sys.executable, "-c", rank + "time.sleep(600)"], stdout=subprocess.DEVNULL).pid
            for line in sys.stdin:
                stage = json.loads(line)["stage"]
                if stage == "dies":
                    os._exit(3)
                failed = {"error": {"type": "WaitTimeout", "message": "late"}}
                done = {"key": stage, "digest": str(os.getpid()), "status": str(pid)}
                print(json.dumps(failed if stage == "fails" else done), flush=True)
            """
        )
    )
    process, command = StageProcess(tmp_path, tmp_path / "log.txt"), [sys.executable, str(script)]
    runner = KeptProcessRunner(process, command, only=lambda request: request.get("model"))
    first, second = (runner.run({"stage": stage}, print) for stage in ("one", "two"))
    assert [first.key, second.key] == ["one", "two"]
    assert first.digest == second.digest != str(os.getpid())
    with pytest.raises(WaitTimeout, match="late"):
        runner.run({"stage": "fails"}, print)
    third = runner.run({"stage": "three"}, print)
    assert third.digest != second.digest
    assert not psutil.pid_exists(int(second.digest))
    with pytest.raises(EspalierError, match=r"the process of dies ended with exit code 3"):
        runner.run({"stage": "dies"}, print)
    fourth = runner.run({"stage": "four"}, print)
    psutil.Process(int(fourth.digest)).kill()  # between two stages
    _wait_for_end(int(fourth.digest))
    fifth = runner.run({"stage": "five"}, print)
    _wait_for_end(int(fourth.status))
    last = runner.run({"stage": "six", "model": "another"}, print)
    assert len({stage.digest for stage in (third, fourth, fifth, last)}) == 4
    runner.close()
    assert not psutil.pid_exists(int(last.digest))
    runner.close()


@pytest.mark.parametrize("options", ["", "on_line=None"])
def test_a_child_ends_with_its_parent(tmp_path, options):
    """The parent is killed with SIGKILL."""
    child = (
        f"from components.compute.lifeline import watch_parent; watch_parent({options}); import time; time.sleep(60)"
    )
    parent = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE, start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    pid = int(process.stdout.readline())
    assert psutil.pid_exists(pid)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=600)
    _wait_for_end(pid)


def _wait_for_end(pid):
    limit = time.monotonic() + 600
    while _runs(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
