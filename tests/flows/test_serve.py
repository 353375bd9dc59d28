"""Experiments as Prefect deployments: what is refused, what is registered, and that a run from there is the same run.

No server and no process here, but for the session's own server. `test_serve_browser.py` does it all for real.
"""

from __future__ import annotations

import json
import logging
import shlex
import socket

import pytest

from components.errors import ResourceError, SpecError
from flows import serve
from flows.experiment.compose import compose
from flows.scheduling import parameters
from flows.scheduling.parameters import ServedExperiment
from tests.flows.test_online_rl import Recorder
from tests.flows.test_tasks import check_rows, logged, rows, say


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """Restore the environment variables that the command sets."""
    import os

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())


def refused(*argv):
    """Assert that the command reports a user error."""
    assert serve.main(list(argv)) == 2


# --- what is refused before anything is registered --------------------------------------------------------------------


OPTIONS = [
    ([], "+experiment: no experiment is given"),
    (["+experiment=smoke,smoke"], "+experiment: smoke: given twice"),
    (["+experiment=smoke,ppo", "--name", "a"], "--name: 'a': 2 deployments cannot share one name"),
    (["+experiment=smoke", "--name", "a/b"], "--name: 'a/b': expected letters"),
    (["+experiment=smoke", "--interval", "6"], "--interval: '6': expected a number with unit s, m, h or d"),
    (["+experiment=smoke", "--interval", "1s"], "at least 10s"),
    (["+experiment=smoke", "--timezone", "Europe/Berlin"], "--timezone: requires --cron"),
    (["+experiment=smoke", "--cron", "0 3 * * *", "--timezone", "Mars"], "--timezone: 'Mars': expected a name"),
    (["+experiment=smoke", "--limit", "0"], "--limit: 0: expected 1 or more"),
    (["+experiment=smoke", "--port", "70000"], "--port: 70000: expected 1 to 65535"),
    (["+experiment=smoke", "--tag", ""], "--tag: is empty"),
    (["+experiment=smoke", "--pool", ""], "--pool: '': expected the name of a work pool"),
    (["+experiment=smoke", "--name", ""], "--name: '': expected letters, digits"),
]


def test_options_that_are_wrong():
    for argv, words in OPTIONS:
        (problem,) = serve.check_options(serve.parser().parse_intermixed_args(argv))
        assert words in str(problem), argv


NO_PARAMETERS = [
    ("judge.api_key=abc123", "judge.api_key: holds a secret"),
    ("store=s3://me:abc123@host/x", "store: holds a secret"),
    ("hydra.mode=MULTIRUN", "hydra.mode: is for the command line only"),
    ("experiment=ppo", "experiment: is fixed by the deployment"),
]


def test_overrides_that_are_no_parameters():
    for line, words in NO_PARAMETERS:
        with pytest.raises(SpecError) as error:
            parameters.resolve(ServedExperiment("a", "smoke", (line,)))
        assert words in str(error.value), line
        assert "abc123" not in str(error.value)


def test_all_mistakes_are_told_at_once_and_nothing_starts(capsys, tmp_path):
    refused("+experiment=smok", f"root={tmp_path}", "rounds=-1", "--limit", "0", "--interval", "x")
    stderr = capsys.readouterr().err
    assert stderr.startswith("4 problems in the configuration:")
    for words in ("experiment: 'smok': expected one of", "rounds: -1: expected at least 0", "--limit: 0", "--interval"):
        assert words in stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_a_pool_without_a_server_that_stays_and_a_schedule_that_is_none(capsys, tmp_path):
    refused("+experiment=smoke", f"root={tmp_path}", "--pool", "gpu")
    assert "--pool gpu: workers need a server that outlives this command" in capsys.readouterr().err
    refused("+experiment=smoke", f"root={tmp_path}", "--cron", "0 25 * * *")
    assert "--cron: '0 25 * * *': expected minute, hour" in capsys.readouterr().err


def test_a_port_that_is_taken_and_a_server_that_does_not_answer_are_named(capsys, monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused("+experiment=smoke", f"root={tmp_path}", "--port", str(port))
    stderr = capsys.readouterr().err
    assert f"--port {port}: cannot listen (Address already in use)" in stderr
    assert "PREFECT_API_URL" in stderr
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    refused("+experiment=smoke", f"root={tmp_path}")
    assert "PREFECT_API_URL=http://127.0.0.1:9/api: no Prefect server answers (" in capsys.readouterr().err


def test_intervals():
    seconds = {"90s": 90, "30m": 1800, "6h": 21600, "1 d": 86400, "9s": None, "six": None}
    assert {text: (found := serve.interval(text)) and found.total_seconds() for text in seconds} == seconds


# --- the same run -----------------------------------------------------------------------------------------------------


def test_a_run_of_a_deployment_has_the_stage_keys_of_the_command_line(tmp_path):
    keys = "serve.overrides=[rounds,algorithm.learning_rate,collect.group_size]"
    served = ServedExperiment("a", "smoke", (keys, f"root={tmp_path}"))
    requested = ["rounds=2", "algorithm.learning_rate=1e-5", "collect.group_size=4"]
    spec = compose(["+experiment=smoke", *requested, f"root={tmp_path}"])
    ran = parameters.resolve(served, requested)
    ours, theirs = (Recorder(tmp_path, **one.model_dump(mode="json", by_alias=True)) for one in (ran, spec))
    assert ours.keys == theirs.keys
    assert len(ours.keys) > 10


def test_own_config_groups_can_be_served(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n# Mine.\nname: mine\nrounds: 7\n")
    assert parameters.resolve(ServedExperiment("a", "mine", config_dir=str(tmp_path))).rounds == 7


def test_the_processes_that_run_get_what_the_operator_serves():
    served = [ServedExperiment("a", "smoke", ("rounds=2",), "/conf"), ServedExperiment("b", "ppo")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(parameters.VARIABLE, parameters.to_json(served))
        assert [parameters.from_environment(one.name) for one in served] == served


# --- on a server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def connected(prefect_server, monkeypatch):
    """Yield Prefect's client of the session's server."""
    from prefect import get_client
    from prefect.settings import temporary_settings

    monkeypatch.setenv("PREFECT_API_URL", prefect_server.url())
    with temporary_settings(prefect_server.settings()), get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def waited(monkeypatch):
    """Make the command return after registration instead of waiting for runs; return the registered deployments."""
    found = []
    monkeypatch.setattr(serve, "_wait", lambda deployments: found.extend(deployments) or 0)
    return found


def latest(client):
    """Return the flow run that started last."""
    from prefect.client.schemas.sorting import FlowRunSort

    (flow_run,) = client.read_flow_runs(limit=1, sort=FlowRunSort.START_TIME_DESC)
    return flow_run


def registered(client, name, recipe="online-rl"):
    return client.read_deployment_by_name(f"{recipe}/{name}")


def test_what_is_registered(connected, waited, capsys, tmp_path):
    argv = [
        "+experiment=smoke,ppo",
        "serve.overrides=[rounds,seed]",
        f"root={tmp_path}",
        "--cron",
        "0 3 * * *",
        "--timezone",
        "Europe/Berlin",
    ]
    assert serve.main([*argv, "--tag", "nightly", "--limit", "2"]) == 0
    assert [one.name for one in waited] == ["smoke", "ppo"]
    deployment = registered(connected, "smoke")
    assert deployment.parameters == {"overrides": []}
    assert f"+experiment=smoke 'serve.overrides=[rounds,seed]' root={tmp_path}" in deployment.description
    assert "A run may set: `rounds`, `seed`" in deployment.description
    assert deployment.tags == ["nightly"]
    assert deployment.entrypoint == "flows.scheduling.served_flow.experiment"
    assert [(schedule.schedule.cron, schedule.schedule.timezone) for schedule in deployment.schedules] == [
        ("0 3 * * *", "Europe/Berlin")
    ]
    assert deployment.global_concurrency_limit.limit == 2
    form = deployment.parameter_openapi_schema["properties"]
    assert list(form) == ["overrides"]
    assert (form["overrides"]["type"], form["overrides"]["items"]["pattern"]) == ("array", "^(rounds|seed)=")
    assert deployment.enforce_parameter_schema
    assert "online-rl/smoke  on schedule: 0 3 * * *  http://127.0.0.1" in capsys.readouterr().err


def test_a_deployment_belongs_to_the_flow_of_its_recipe(connected, waited, capsys, tmp_path):
    assert (
        serve.main(["+experiment=smoke", "flow=agent_evol", "algorithm=sft", "--name", "evol", f"root={tmp_path}"]) == 0
    )
    deployment = registered(connected, "evol", "agent-evol")
    assert connected.read_flow(deployment.flow_id).name == "agent-evol"
    assert deployment.entrypoint == "flows.scheduling.served_flow.experiment"
    assert "agent-evol/evol  no schedule" in capsys.readouterr().err


def test_the_form_refuses_what_a_run_may_not_set(connected, waited, tmp_path):
    from prefect.exceptions import PrefectHTTPStatusError

    serve.main(["+experiment=smoke", "--name", "form", f"root={tmp_path}", "serve.overrides=[rounds]"])
    deployment = registered(connected, "form").id
    for lines in ("rounds=2", ["seed=1"], ["rounds=2", "+environment=mcp"]):
        with pytest.raises(PrefectHTTPStatusError, match="Validation failed for field"):
            connected.create_flow_run_from_deployment(deployment, parameters={"overrides": lines})
    connected.create_flow_run_from_deployment(deployment, parameters={"overrides": ["rounds=2"]})


def test_a_deployment_of_the_same_name_is_not_replaced_unasked(connected, waited, capsys, tmp_path):
    argv = ["+experiment=smoke", "--name", "twice", f"root={tmp_path}"]
    assert serve.main(argv) == 0
    assert serve.main([*argv, "--interval", "6h"]) == 0  # the same, on a schedule now
    assert serve.main([*argv, "rounds=3"]) == 2
    stderr = capsys.readouterr().err
    command = f"python -m flows.run +experiment=smoke root={tmp_path}"
    assert f"--name: 'twice' exists on the server and runs {command}; expected" in stderr
    assert serve.main([*argv, "rounds=3", "--replace"]) == 0
    assert "rounds=3" in registered(connected, "twice").description


def test_a_pool_is_registered_for_and_not_served(connected, waited, capsys, tmp_path):
    from prefect.client.schemas.actions import WorkPoolCreate

    argv = ["+experiment=smoke", "--name", "pooled", f"root={tmp_path}", "--pool", "machines"]
    assert serve.main(argv) == 2
    stderr = capsys.readouterr().err
    assert "no work pool 'machines'; create it: prefect work-pool create machines --type process" in stderr
    connected.create_work_pool(WorkPoolCreate(name="machines", type="process"))
    assert serve.main(argv) == 0
    assert registered(connected, "pooled").work_pool_name == "machines"
    assert waited == []
    stderr = capsys.readouterr().err
    (line,) = [line for line in stderr.splitlines() if "prefect worker start --pool machines" in line]
    name, _, value = shlex.split(line)[0].partition("=")
    assert (name, json.loads(value)["pooled"]["overrides"]) == (parameters.VARIABLE, [f"root={tmp_path}"])


# --- the flow ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(connected, monkeypatch, waited, tmp_path):
    """Serve `smoke`, start a run with these overrides, execute it here with a replaced experiment, and return its final
    state."""
    from prefect.flow_engine import run_flow

    from flows import session
    from flows.scheduling.served_flow import experiment

    def run(body, *overrides, enforce=True, name=None):
        monkeypatch.setattr(session, "run", body)
        argv = ["+experiment=smoke", f"root={tmp_path}", "serve.overrides=[rounds]", "--name", "ran", "--replace"]
        assert serve.main(argv) == 0
        deployment = registered(connected, "ran")
        if not enforce:
            connected._client.patch(f"/deployments/{deployment.id}", json={"enforce_parameter_schema": False})
        parameters = {"overrides": list(overrides)}
        flow_run = connected.create_flow_run_from_deployment(deployment.id, parameters=parameters, name=name)
        handlers = {name: logging.getLogger(name).handlers[:] for name in ("prefect", "prefect.flow_runs")}
        try:
            return run_flow(experiment, flow_run=flow_run, return_type="state")
        finally:
            for name, kept in handlers.items():
                logging.getLogger(name).handlers[:] = kept

    return run


def test_the_flow_calls_what_the_command_line_calls(ran, tmp_path):
    calls = []

    def run(spec, *, overrides):
        calls.append((spec, overrides))
        return {"success": 0.25}

    state = ran(run, "rounds=3")
    assert (state.name, state.message) == ("Completed", "held-out success 0.250")
    ((spec, overrides),) = calls
    assert overrides == ["+experiment=smoke", f"root={tmp_path}", "serve.overrides=[rounds]", "rounds=3"]
    assert spec == compose(overrides)


@pytest.mark.usefixtures("tiny_stages", "root_logger")
def test_the_log_of_a_served_run_has_console_lines_and_warnings(ran, connected, prefect_server, execution):
    assert ran(lambda spec, *, overrides: logged(execution, say(execution), prefect_server) and {"success": None})
    check_rows(rows(prefect_server, latest(connected).id))


NAMES = [
    (None, [], "ran"),
    (None, ["rounds=3"], "ran: rounds=3"),
    (None, ["seed=" + "1" * 300], "ran: seed=" + "1" * 189 + "…"),
    ("before the holidays", ["rounds=3"], "before the holidays"),
]


def test_a_served_run_is_named_after_what_differs(ran, connected):
    def named(name, overrides):
        ran(lambda spec, *, overrides: {"success": None}, *overrides, enforce=False, name=name)
        return latest(connected).name

    assert [named(given, overrides) for given, overrides, _ in NAMES] == [name for _, _, name in NAMES]


FORM_MISTAKES = [
    ("rounds=-1", "1 problem in the configuration:\n  - rounds: -1"),
    ("seed=1", "'seed=1': a run may not set this; serve.overrides lists rounds"),
    ("a.password=x", "a run may not set this"),
]


def test_a_mistake_in_the_form_fails_the_run_with_the_message_of_the_command_line(ran, connected, prefect_server):
    for line, message in FORM_MISTAKES:
        state = ran(lambda *_, **__: pytest.fail("was run"), line, enforce=False)
        assert [message in row.message for row in rows(prefect_server, latest(connected).id)] == [True], line
        assert state.name == "Failed"
        assert message in state.message
        assert "Traceback" not in state.message


def test_a_run_ends_as_failed_cancelled_or_interrupted(ran, connected):
    from prefect.context import FlowRunContext
    from prefect.states import Cancelling

    def fails(spec, *, overrides):
        raise ResourceError("no weights here; get some")

    state = ran(fails)
    assert (state.name, state.message) == ("Failed", "no weights here; get some")

    def is_interrupted(spec, *, overrides):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ran(is_interrupted)

    def is_cancelled(spec, *, overrides):
        connected.set_flow_run_state(FlowRunContext.get().flow_run.id, Cancelling())
        raise KeyboardInterrupt

    state = ran(is_cancelled)
    assert state.name == "Cancelled"
    assert "finished work is saved" in state.message
