"""The MCP server, as an agent's client uses it: a real client over stdio, real commands, a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows import mcp_server
from flows.agent_tools.permissions import Permissions
from flows.agent_tools.tools import masked
from flows.scheduling.parameters import requested_experiments

pytest.importorskip("mcp")
from anyio.from_thread import start_blocking_portal
from mcp import ClientSession, StdioServerParameters, stdio_client

from tests.databases import give_databases

CODE = Path(__file__).resolve().parents[2]
SMALL = ["warmup=none", "deploy=none", "evaluate.scenarios=2", "serve.overrides=[seed,rounds,algorithm.learning_rate]"]


@dataclass
class ToolAnswer:
    data: Any
    text: str
    failed: bool


Call = Callable[..., ToolAnswer]


@contextlib.contextmanager
def client(root: Path, *arguments: str) -> Iterator[Call]:
    """A session with a server of its own: `call(TOOL, argument=value)`."""
    line = ["-m", "flows.mcp_server", "+experiment=smoke", *SMALL, f"root={root}", *arguments]
    environment = {**os.environ, "MCP_TEST_API_KEY": "planted-secret-1"}
    parameters = StdioServerParameters(command=sys.executable, args=line, env=environment, cwd=CODE)

    @contextlib.asynccontextmanager
    async def session():
        async with stdio_client(parameters) as streams, ClientSession(*streams) as connected:
            await connected.initialize()
            yield connected

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(session()) as connected:

        def call(tool: str, **values: Any) -> ToolAnswer:
            result = portal.call(connected.call_tool, tool, values)
            text = "".join(item.text for item in result.content)
            return ToolAnswer(result.structured_content, text, bool(result.is_error))

        call.tools = lambda: portal.call(connected.list_tools).tools  # type: ignore[attr-defined]
        yield call


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("agent-root")
    give_databases(root)
    return root


@pytest.fixture(scope="module")
def call(root) -> Iterator[Call]:
    with client(root) as connected:
        yield connected


def processes(root: Path) -> list[str]:
    """Command lines of processes that have to do with a root, without servers."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            line = process.cmdline()
            if any(str(root) in part for part in line) and "flows.mcp_server" not in line:
                found.append(" ".join(line))
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_every_tool_says_what_it_does(call):
    tools = {tool.name: tool for tool in call.tools()}
    assert list(tools) == ["list_experiments", "advise", "plan", "run", "status", "stop", "evaluate", "compare"]
    assert all(len(tool.description) > 40 and "\n    " not in tool.description for tool in tools.values())
    assert "rounds=2" in json.dumps(tools["plan"].input_schema)


def test_experiments_are_listed_with_what_may_be_set(call):
    (experiment,) = call("list_experiments").data["experiments"]
    assert experiment["name"] == "smoke"
    assert experiment["description"].startswith("The flow of the quickstart with size=tiny")
    assert experiment["takes"].startswith("under a minute")
    assert experiment["settings"].keys() == {"seed", "rounds", "algorithm.learning_rate"}
    assert experiment["settings"]["rounds"] == 1


def test_the_tool_of_the_course_shows_or_runs_what_it_may(root):
    training = {"action": "train", "algorithm": "sft", "model_name": "tiny", "output_dir": "sft"}
    with client(root, "--course", "show") as call:
        schema = json.dumps(next(tool for tool in call.tools() if tool.name == "rl_training").input_schema)
        assert all(name in schema for name in ("load_dataset", "create_reward", "num_generations"))
        reward = call("rl_training", parameters={"action": "create_reward", "reward_type": "step"}).data
        assert reward["experiment"].startswith("python -m flows.run reward=steps")
        shown = call("rl_training", parameters=training).data
        assert "id" not in shown
        assert "warmup=sft" in shown["experiment"]
        for key, value, text in (
            ("output_dir", "../sft", "expected a name without a path"),
            ("model_name", "/etc", "ORG/NAME of the hub"),
            ("dataset", "pyproject.toml", "expected ORG/NAME of the hub"),
            ("dataset", "https://evil.test/x", "expected ORG/NAME of the hub"),
        ):
            refused = call("rl_training", parameters={**training, key: value})
            assert refused.failed
            assert text in refused.text
        assert "has this output_dir" in call("rl_training", parameters={"action": "evaluate", "model_path": "x"}).text
    (root / "course").mkdir(exist_ok=True)
    rows = [{"question": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(12)]
    (root / "course" / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with client(root, "--course", "run") as call:
        started = call("rl_training", parameters={**training, "dataset": "questions.jsonl", "max_samples": 4}).data
        ended = call("status", id=started["id"], wait_seconds=300).data
        assert ended["state"] == "finished", ended
        assert ended["result"]["output_dir"] == str(root / "course" / "sft")
    assert (root / "course" / "sft" / "adapter_config.json").is_file()


def test_a_plan_lists_the_stages(call):
    answer = call("plan", experiment="smoke", overrides=["rounds=2"])
    stages = {stage["label"]: stage["status"] for stage in answer.data["stages"]}
    assert "train[2]" in stages
    assert "train[3]" not in stages


def test_advice_is_that_of_the_command(call):
    advice = call("advise", circumstances={"environment": "retail", "compute": "cpu"}).data
    assert advice["method"] == "SFT + GRPO"
    assert advice["command"].startswith("python -m flows.run ")


ERRORS = [
    ("plan", {"experiment": "smoke", "overrides": ["rounds=-1"]}, "rounds: -1: expected at least 0"),
    ("run", {"experiment": "smoke", "overrides": ["rounds=x"]}, "rounds: 'x': expected a whole number"),
    ("plan", {"experiment": "smok"}, "is not offered; expected one of smoke"),
    ("run", {"experiment": "quickstart"}, "is not offered"),
    ("run", {"experiment": "smoke", "overrides": ["allow=[os]"]}, "a run may not set this"),
    ("evaluate", {"experiment": "smoke", "policies": ["openai/gpt-5-mini"]}, "is no policy here"),
    ("compare", {"runs": ["nothing", "latest"]}, "there is no run"),
    ("compare", {"runs": ["--html", "latest"]}, "is no run"),
    ("advise", {"circumstances": {"sparse": "yes"}}, "expected --environment NAME"),
    ("status", {"id": "run-1"}, "there is no such job"),
]


def test_an_error_of_a_command_is_the_error_of_the_tool(call):
    for tool, arguments, message in ERRORS:
        answer = call(tool, **arguments)
        assert answer.failed, (tool, arguments)
        assert message in answer.text
        assert "Traceback" not in answer.text


def test_an_agent_runs_evaluates_and_compares(call, root):
    first = call("run", experiment="smoke", overrides=["rounds=1"]).data
    status = finished(call, first["id"])
    assert status["result"]["rounds"] == 1
    assert status["run"]["round"] == status["run"]["rounds"] == 1
    assert set(status["run"]["stages"]) >= {"collect[1]", "train[1]", "evaluate[final]"}
    assert any("round 1/1" in line for line in status["log"])
    assert "planted-secret-1" not in json.dumps(status)

    repeated = finished(call, call("run", experiment="smoke", overrides=["rounds=1"]).data["id"])
    assert set(repeated["result"]["stages"].values()) == {"cached"}
    assert repeated["result"]["run_id"] == status["run"]["run"]

    base = finished(call, call("run", experiment="smoke", overrides=["rounds=0"]).data["id"])
    comparison = call("compare", runs=[base["id"], first["id"]]).data
    assert [run["id"] for run in comparison["runs"]] == [base["run"]["run"], status["run"]["run"]]
    assert comparison["config"]["results"]["rounds"] == ["0", "1"]

    evaluation = call("evaluate", experiment="smoke", policies=["base", f"{first['id']}@1"]).data
    result = finished(call, evaluation["id"])["result"]
    assert list(result["policies"]) == ["base", f"{status['run']['run']}@1"]
    assert Path(result["html"]).is_relative_to(root)


def finished(call: Call, job: str) -> dict[str, Any]:
    while (status := call("status", id=job, wait_seconds=60).data)["state"] == "running":
        pass
    assert status["state"] == "finished", status
    return status


def test_one_run_at_a_time_and_stop_ends_its_processes(call, root):
    started = call("run", experiment="smoke", overrides=["rounds=50", "seed=7"]).data
    assert started["state"] == "running"
    assert processes(root)
    refused = call("run", experiment="smoke", overrides=["seed=8"])
    assert refused.failed
    assert "at most 1 may run at once" in refused.text
    assert call("stop", id=started["id"]).data["state"] == "stopped"
    assert processes(root) == []
    assert call("stop", id=started["id"]).data["state"] == "stopped"


def test_a_run_ends_with_its_server(tmp_path):
    session = contextlib.ExitStack()
    call = session.enter_context(client(tmp_path))
    try:
        started = call("run", experiment="smoke", overrides=["rounds=50"]).data
        assert started["state"] == "running"
        (server,) = (child for child in psutil.Process().children() if f"root={tmp_path}" in child.cmdline())
        assert processes(tmp_path)
        wait_for(lambda: list((tmp_path / "logs").glob("smoke-*.log")))
        server.kill()
    finally:
        with contextlib.suppress(Exception):  # the connection is broken
            session.close()
    wait_for(lambda: not processes(tmp_path))


def test_a_supervisor_kills_what_ignores_its_signals(tmp_path):
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    parent = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True).wait()"
    )
    code = (
        "import sys; from flows.agent_tools import supervisor; supervisor.GRACE = 0.5; "
        f"sys.exit(supervisor.main([{str(tmp_path)!r}, sys.executable, '-c', {parent!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=CODE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    command = psutil.Process(int(process.stdout.readline()))
    wait_for(lambda: b"deaf" in (tmp_path / "stdout").read_bytes())
    (child,) = command.children()
    process.send_signal(signal.SIGTERM)  # only the end of the input stops it
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(600) == 130
    process.stdout.close()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_answers_contain_no_secret(monkeypatch):
    monkeypatch.setenv("PLANTED_API_KEY", "unusual value")
    monkeypatch.setenv("PLANTED_TEXT", "ordinary value")
    answer = masked({"log": ["an unusual value, an ordinary value"], "api_key": "abcdefgh", "rounds": 3})
    assert answer == {"log": ["an ***, an ordinary value"], "api_key": "***", "rounds": 3}


OPERATOR = [
    ([], "no experiment is given"),
    (["+experiment=smoke", "--limit", "0"], "--limit: 0: expected 1 or more"),
    (["+experiment=smok"], "smok"),
    (
        ["+experiment=smoke", "serve.overrides=[rounds,root]"],
        "'root' reads or writes files, which an agent",
    ),
    (["+experiment=smoke", "serve.overrides=[environment._target_]"], "which an agent must not choose"),
]


def test_a_mistake_of_the_operator_is_reported_before_the_server_answers(capsys, monkeypatch):
    for arguments, message in OPERATOR:
        assert mcp_server.main(arguments) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)  # without the package: the remedy
    assert mcp_server.main(["+experiment=smoke"]) == 2
    assert "flows.mcp_server: the package" in (error := capsys.readouterr().err)
    assert "pip install -e '.[mcp]'" in error


def test_the_configuration_of_the_guide_is_valid():
    guide = (CODE / "docs/guides/agents_that_train.md").read_text("utf-8")
    configuration = json.loads(guide.partition("```json\n")[2].partition("```")[0])
    dash, module, *overrides = configuration["mcpServers"]["espalier"]["args"]
    assert (dash, module) == ("-m", "flows.mcp_server")
    offered = Permissions(requested_experiments(overrides)).specs
    assert all("rounds" in spec.serve.overrides for spec in offered.values())
    assert list(offered) == ["quickstart", "tic_tac_toe"]


def test_runs_of_every_experiment_are_compared_and_a_sweep_shows_all_of_its_runs(tmp_path, monkeypatch):
    from types import SimpleNamespace
    from typing import cast

    from flows.agent_tools.jobs import Job
    from flows.agent_tools.tools import Tools, records_of
    from flows.history.records import Records
    from tests.flows.pretend import pretend

    first, second = tmp_path / "first", tmp_path / "second"
    pretend(first)
    runs = [pretend(second), pretend(second, seed=1)]
    permitted = SimpleNamespace(roots=[first, second], root=first)
    tools = Tools(cast(Permissions, permitted), cast(Any, None))
    assert tools._root_of([run.id for run in runs]) == second
    assert tools._root_of(["unknown"]) == first

    for run in runs:
        run.process = f"process 7 on {socket.gethostname()}"
        Records(second).write(run)
    job = cast(Job, SimpleNamespace(root=second, pid=7, started=0))
    assert {record.id for record in records_of(job)} == {run.id for run in runs}
