"""Stages as Prefect tasks: names, states, references; what Prefect is told is what happened."""

import logging
from types import SimpleNamespace

import pytest

from components.specs import validate
from flows.execution import Execution
from flows.interrupt import Interruption
from flows.spec import ExperimentSpec
from flows.stages.base import Context, Request
from tests.flows.test_online_rl import DATA

pytestmark = pytest.mark.usefixtures("tiny_stages", "prefect_server")


@pytest.fixture
def execution(tmp_path, screen):
    spec = validate(ExperimentSpec, {**DATA, "root": str(tmp_path)})
    return Execution(spec, Context.at(tmp_path), screen[0], None, tmp_path / "log")


def run(execution, body, prefect_server):
    from flows.tasks import run_flow

    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        with Interruption() as interruption:
            return run_flow("online-rl", execution, body, prefect_server, interruption)
    finally:
        logging.getLogger().handlers[:], logging.getLogger().level = handlers, level


def runs(prefect_server):
    """The latest flow run, and its task runs by name."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_server.url()}), get_client(sync_client=True) as client:
        (flow_run,) = client.read_flow_runs(limit=1, sort=FlowRunSort.START_TIME_DESC)
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [flow_run.id]}))
        return flow_run, {task_run.name: task_run for task_run in found}


def wait_for(prefect_server, count):
    import time

    limit = time.monotonic() + 20  # task runs are recorded from events, a moment later
    while time.monotonic() < limit:
        flow_run, tasks = runs(prefect_server)
        if len(tasks) == count and all(task.state.is_final() for task in tasks.values()):
            break
        time.sleep(0.2)
    return flow_run, tasks


def test_a_stage_that_is_found_ends_as_cached(execution, prefect_server):
    def body(call):
        first = call("add[1]", 1, Request("add", {"amount": 1}))
        again = call("add[2]", 2, Request("add", {"amount": 1}))
        assert first == again
        return SimpleNamespace(markdown=lambda: "# Results")

    run(execution, body, prefect_server)
    flow_run, tasks = wait_for(prefect_server, 2)
    assert (flow_run.name, flow_run.state.name) == ("test seed 0", "Completed")
    assert flow_run.parameters["experiment"]["name"] == "test"
    assert {name: task.state.name for name, task in tasks.items()} == {"add[1]": "Completed", "add[2]": "Cached"}
    assert [done.status for done in execution.done.values()] == ["ran", "cached"]


def test_a_stage_that_fails_fails_the_run(execution, prefect_server):
    with pytest.raises(ValueError, match="below zero"):
        run(execution, lambda call: call("add[1]", 1, Request("add", {"amount": -1})), prefect_server)
    flow_run, tasks = wait_for(prefect_server, 1)
    assert flow_run.state.name == "Failed"
    assert tasks["add[1]"].state.name == "Failed"


def test_an_interrupted_stage_is_a_crash_not_a_failure(execution, prefect_server):
    def body(call):
        call("add[1]", 1, Request("add", {"amount": 1}))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(execution, body, prefect_server)
    flow_run, _ = wait_for(prefect_server, 1)
    assert flow_run.state.name == "Crashed"
