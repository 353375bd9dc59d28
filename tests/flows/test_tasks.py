"""Stages as Prefect tasks: names, states and references in Prefect match the run."""

import logging
import socket
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.compute.runners import KeptProcessRunner, ProcessRunner, StageProcess
from components.errors import EspalierError, SpecError
from flows.history.records import Records, RunRecord, recording
from flows.orchestration.prefect_log import MOST_ROWS, TIMEOUT, PrefectLog
from flows.reporting.results import EPISODE_COLUMNS, ResultTable
from flows.stages import STAGES
from flows.stages.base import Request
from flows.terminal.console import logging_to
from flows.terminal.interrupt import Interruption
from tests.flows import waiting

pytestmark = pytest.mark.usefixtures("tiny_stages", "prefect_server")


class Found:
    """Results that a body returns."""

    pruned = None

    def markdown(self):
        return "# Results"

    def tables(self):
        return [ResultTable("episodes", "", EPISODE_COLUMNS, [["start", "0.5", "0.5", "1"]])]


def run(execution, body, prefect_server, *dead, log=None):
    from flows.orchestration.tasks import run_flow

    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        with Interruption() as interruption:
            return run_flow("online-rl", execution, body, prefect_server, interruption, *dead, log=log)
    finally:
        logging.getLogger().handlers[:], logging.getLogger().level = handlers, level


def runs(prefect_server):
    """Return the latest flow run and its task runs by name."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort
    from prefect.settings import temporary_settings

    with temporary_settings(prefect_server.settings()), get_client(sync_client=True) as client:
        (flow_run,) = client.read_flow_runs(limit=1, sort=FlowRunSort.START_TIME_DESC)
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [flow_run.id]}))
        return flow_run, {task_run.name: task_run for task_run in found}


def wait_for(prefect_server, count):
    def ended():  # task runs are recorded from events, a moment later
        tasks = runs(prefect_server)[1].values()
        return len(tasks) == count and all(task.state and task.state.is_final() for task in tasks)

    waiting.until(ended)
    return runs(prefect_server)


def check_both_at_once(prefect_server, *names):
    """Assert that the flow run has these two tasks, which completed and were at work at the same time."""
    flow_run, tasks = wait_for(prefect_server, 2)
    assert flow_run.state.name == "Completed"
    assert {name: task.state.name for name, task in tasks.items()} == dict.fromkeys(names, "Completed")
    assert max(task.start_time for task in tasks.values()) < min(task.end_time for task in tasks.values())


def test_a_stage_that_is_found_ends_as_cached(execution, prefect_server, tmp_path):
    """The record names the flow run from the beginning, so that a run that is killed at once is known in Prefect."""

    def body(call, beside, at_once):
        (record,) = Records(tmp_path).all()
        assert record.prefect_flow_run == execution.record.run.prefect_flow_run != ""
        first = call("add[1]", 1, Request("add", {"amount": 1}))
        again = call("add[2]", 2, Request("add", {"amount": 1}))
        assert first == again
        return Found()

    with recording(tmp_path, RunRecord("abcdef", "test", 0, time.time())) as execution.record:
        run(execution, body, prefect_server)
    flow_run, tasks = wait_for(prefect_server, 2)
    assert (flow_run.name, flow_run.state.name) == ("test seed 0", "Completed")
    assert flow_run.parameters["experiment"]["name"] == "test"
    assert {name: task.state.name for name, task in tasks.items()} == {"add[1]": "Completed", "add[2]": "Cached"}
    assert [done.status for done in execution.done.values()] == ["ran", "cached"]


FOREIGN = "\x1b]0;owned\x07\x1b[2Jthe server answered api_key=sk-abcdefghijklmnopqrstuvwx"


def say(execution):
    """Return a body with console lines, warnings and a stage, also from a thread without Prefect's context."""

    def body(call, beside, at_once):
        call("add[1]", 1, Request("add", {"amount": 1}))
        execution.console.line(FOREIGN)
        thread = threading.Thread(target=lambda: logging.getLogger("some.library").warning("from a thread"))
        thread.start()
        thread.join()
        logging.getLogger("some.library").info("only in the file")
        return Found()

    return body


def logged(execution, body, prefect_server):
    """Run the body as `flows.session.run` does."""
    with logging_to(Path(execution.spec.root, "run.log"), execution.console), PrefectLog() as log:
        logging.getLogger("flows.x").warning("before the flow run exists")
        return run(execution, body, prefect_server, log=log)


def rows(prefect_server, flow_run_id):
    """Return the rows of a flow run's log."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import LogFilter
    from prefect.settings import temporary_settings

    with temporary_settings(prefect_server.settings()), get_client(sync_client=True) as client:
        return client.read_logs(LogFilter(flow_run_id={"any_": [flow_run_id]}))


def check_rows(found):
    """Assert that the log has the lines and warnings of `say`, safe to show."""
    lines = [row.message for row in found]
    for words in ("before the flow run exists", "from a thread"):
        assert lines.count(words) == 1
    assert [line for line in lines if line.startswith("add[1] ran")]
    (foreign,) = [line for line in lines if "the server answered" in line]
    assert "abcdefghijkl" not in foreign
    assert not set("\x1b\x07") & set(foreign)
    assert "only in the file" not in lines


def test_console_lines_and_warnings_are_in_the_log_of_the_flow_run(execution, prefect_server):
    logged(execution, say(execution), prefect_server)
    flow_run, tasks = wait_for(prefect_server, 1)
    found = rows(prefect_server, flow_run.id)
    check_rows(found)
    (stage,) = [row for row in found if row.message.startswith("add[1] ran")]
    assert stage.task_run_id == tasks["add[1]"].id


def test_a_failed_stage_fails_the_run_and_is_in_the_log_without_its_stack_trace(execution, prefect_server):
    def body(call, beside, at_once):
        call("add[1]", 1, Request("add", {"amount": -1}))

    with pytest.raises(ValueError, match="below zero"):
        logged(execution, body, prefect_server)
    flow_run, tasks = wait_for(prefect_server, 1)
    assert (flow_run.state.name, tasks["add[1]"].state.name) == ("Failed", "Failed")
    lines = [row.message for row in rows(prefect_server, flow_run.id)]
    assert [line for line in lines if "below zero" in line]
    assert not [line for line in lines if "Traceback" in line]


@pytest.mark.parametrize("server", ["refuses connections", "never answers"])
def test_a_log_without_a_server_delays_neither_the_run_nor_its_end(prefect_root, tmp_path, server):
    from prefect.settings import temporary_settings

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if server == "refuses connections":
            listener.close()
        with temporary_settings({"api.url": f"http://127.0.0.1:{port}/api"}), PrefectLog() as log:
            log.connect(str(uuid.uuid4()))
            for number in range(5 * MOST_ROWS):
                logging.getLogger("some.library").warning("row %d", number)
            assert log._rows.qsize() <= MOST_ROWS
            joined = []
            log._thread.join = joined.append
        assert joined == [TIMEOUT]


def test_what_runs_beside_a_stage_is_a_task_of_the_same_flow(execution, prefect_server, tmp_path, monkeypatch):
    monkeypatch.setitem(STAGES, "wait", waiting.STAGE)
    execution.second = KeptProcessRunner(StageProcess(tmp_path, tmp_path / "stages.log"), waiting.COMMAND)
    begun = str(tmp_path / "begun")

    def body(call, beside, at_once):
        with beside("train[1]", lambda aside: aside("collect[2]", 2, Request("wait", {"number": 2, "touch": begun}))):
            call("train[1]", 1, Request("wait", {"number": 1, "wait_for": begun}))
        return Found()

    run(execution, body, prefect_server)
    execution.second.close()
    check_both_at_once(prefect_server, "train[1]", "collect[2]")
    assert list(execution.done) == ["train[1]", "collect[2]"]


def test_branches_at_the_same_time_are_tasks_of_the_same_flow(execution, prefect_server, tmp_path, monkeypatch):
    monkeypatch.setitem(STAGES, "wait", waiting.STAGE)
    compute = {"default": "process", "parallel": 2}
    execution.spec = execution.spec.model_copy(update={"compute": execution.spec.compute.model_copy(update=compute)})
    for name in ("process", "process-2"):
        execution._runners[name] = ProcessRunner(StageProcess(tmp_path, tmp_path / "stages.log"), waiting.COMMAND)
    begun = [str(tmp_path / name) for name in ("first", "second")]

    def branch(number):
        options = {"number": number, "touch": begun[number], "wait_for": begun[1 - number]}
        return lambda call: call(f"collect[{number}]", 1, Request("wait", options))

    def body(call, beside, at_once):
        at_once([branch(0), branch(1)])
        return Found()

    run(execution, body, prefect_server)
    check_both_at_once(prefect_server, "collect[0]", "collect[1]")


@pytest.mark.parametrize(("error", "tries"), [(EspalierError("killed"), 2), (SpecError([]), 1), (ValueError("x"), 1)])
def test_a_stage_is_tried_again_where_that_may_help(execution, prefect_server, error, tries, monkeypatch):
    execution.spec = execution.spec.model_copy(
        update={"compute": execution.spec.compute.model_copy(update={"retries": 1, "retry_delay": 0.0})}
    )
    real, asked = execution.stage, []

    def stage(label, step, request):
        asked.append(label)
        if len(asked) == 1:
            raise error
        return real(label, step, request)

    monkeypatch.setattr(execution, "stage", stage)

    def body(call, beside, at_once):
        call("add[1]", 1, Request("add", {"amount": 1}))
        return Found()

    if tries == 2:
        run(execution, body, prefect_server)
    else:
        with pytest.raises(type(error)):
            run(execution, body, prefect_server)
    assert len(asked) == tries
    _, tasks = wait_for(prefect_server, 1)
    assert tasks["add[1]"].run_count == tries
    assert tasks["add[1]"].state.name == ("Completed" if tries == 2 else "Failed")


def test_an_interrupted_stage_is_a_crash_not_a_failure(execution, prefect_server):
    def body(call, beside, at_once):
        call("add[1]", 1, Request("add", {"amount": 1}))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(execution, body, prefect_server)
    flow_run, _ = wait_for(prefect_server, 1)
    assert flow_run.state.name == "Crashed"


def nothing(call, beside, at_once):
    return Found()


@pytest.fixture
def connected(prefect_server):
    """Use the tests' server for Prefect's client inside the block."""
    from prefect.settings import temporary_settings

    with temporary_settings(prefect_server.settings()):
        yield


@pytest.fixture
def killed(tmp_path, connected):
    """Create two runs that were killed during a task, in the records and in Prefect."""
    from prefect import flow, task
    from prefect.client.orchestration import get_client
    from prefect.states import Running

    records = Records(tmp_path)
    with get_client(sync_client=True) as client:
        for number in range(2):
            flow_run = client.create_flow_run(flow(lambda: None, name="online-rl"), state=Running())
            client.create_task_run(task(nothing), flow_run.id, dynamic_key="0", state=Running())
            records.write(
                RunRecord(uuid.uuid4().hex, "test", 0, time.time() + number, prefect_flow_run=str(flow_run.id))
            )
    return records


def states(records):
    """Return the states of all records' flow runs, latest first; each task has the same state."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    with get_client(sync_client=True) as client:
        found = []
        for record in records.all():
            flow_run = client.read_flow_run(uuid.UUID(record.prefect_flow_run))
            (task_run,) = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [flow_run.id]}))
            assert task_run.state.name == flow_run.state.name
            found.append(flow_run.state.name)
        return found


def test_runs_that_were_killed_crash_in_prefect_and_their_records_are_closed(execution, prefect_server, killed):
    run(execution, nothing, prefect_server, killed.dead(), killed.close)
    assert states(killed) == ["Crashed", "Crashed"]
    assert [run.status for run in killed.all()] == ["KILLED", "KILLED"]


def test_a_server_that_cannot_be_told_of_killed_runs_costs_a_warning_and_is_told_by_the_next_run(
    execution, prefect_server, killed, monkeypatch, caplog
):
    import prefect

    first, second = killed.dead()
    real, asked = prefect.get_client, []

    def fails_at_the_second(**options):
        asked.append(options)
        if len(asked) > 1:
            raise ConnectionResetError("gone in the night")
        return real(**options)

    with monkeypatch.context() as patch:
        patch.setattr("prefect.get_client", fails_at_the_second)
        done = run(execution, nothing, prefect_server, [first, second], killed.close)
    assert done.markdown() == "# Results"
    (warning,) = [text for text in caplog.messages if "cannot set these killed flow runs to Crashed" in text]
    assert f"{second.prefect_flow_run} (run {second.short}). ConnectionResetError: gone in the night" in warning
    assert first.prefect_flow_run not in warning
    assert states(killed) == ["Crashed", "Running"]
    assert [run.id for run in killed.dead()] == [second.id]
    run(execution, nothing, prefect_server, killed.dead(), killed.close)
    assert states(killed) == ["Crashed", "Crashed"]
    assert killed.dead() == []


def test_a_server_that_does_not_answer_leaves_the_records_open(killed, caplog):
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from flows.orchestration.tasks import _close

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}):
        _close(killed.dead(), killed.close)
    assert len(killed.dead()) == 2
    (warning,) = caplog.messages
    for run in killed.dead():
        assert f"{run.prefect_flow_run} (run {run.short})" in warning
    assert "ConnectError" in warning


@pytest.mark.security
@pytest.mark.slow
@pytest.mark.parametrize("ends_well", [True, False])
def test_a_server_that_is_killed_delays_the_end_of_a_run_by_seconds(execution, prefect_root, monkeypatch, ends_well):
    """Without the check, each request to a stopped server would be retried for 14 s."""
    import anyio
    from prefect.client import base

    from flows.orchestration import server, tasks

    doomed = server.start(prefect_root)
    pauses: list[float] = []
    warnings: list[str] = []

    async def pause(seconds):
        pauses.append(seconds)
        await anyio.sleep(seconds)

    def pause_thread(seconds):
        pauses.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(base, "anyio", SimpleNamespace(**vars(anyio) | {"sleep": pause}))
    monkeypatch.setattr(base, "time", SimpleNamespace(**vars(time) | {"sleep": pause_thread}))
    monkeypatch.setattr(tasks.logger, "warning", lambda text, *values: warnings.append(text % values))

    def body(call, beside, at_once):
        doomed.kill()
        doomed.wait()
        if not ends_well:
            raise EspalierError("something else")
        return Found()

    doomed.url()
    if ends_well:
        assert run(execution, body, doomed).markdown() == "# Results"
    else:
        with pytest.raises(EspalierError, match="something else"):
            run(execution, body, doomed)
    assert sum(pauses) < 10  # seconds; 28 where each request is tried again
    doomed.stop()
    ended = "the run is finished, but the Prefect server did not get all of its states: the Prefect server has stopped"
    assert warnings == ([ended] if ends_well else [])
