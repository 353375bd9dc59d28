"""The flow `mcp_rl`: tasks by a model for the tools of a real MCP server, RULER and GRPO, in one command; its plan, its
resumption and its errors."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from components.errors import ResourceError, SpecError
from flows.experiment.compose import compose
from flows.experiment.requests import Requests
from flows.planning.plan import plan
from flows.stages.base import Context
from flows.stages.execute import request_key, run_stage
from tests.refusals import wrong_refusals
from tests.rewards.judge_server import Reply, judge_server

pytest.importorskip("mcp")
pytestmark = pytest.mark.timeout(1800)  # seconds; servers start slowly on a busy machine
CODE = Path(__file__).resolve().parents[2]
SERVER = CODE / "tests" / "environments" / "mcp_server.py"
WANTED = re.compile(r"Write (\d+) different tasks of difficulty (\d)")
EMPTY = """
from mcp.server.mcpserver import MCPServer
MCPServer("empty", log_level="ERROR").run("stdio")
"""


def author(asked) -> Reply:
    """Write the requested tasks for a question about tools, and judge episodes by the default answer."""
    if not (wanted := WANTED.search(asked.prompt)):
        return Reply()
    tasks = [
        {"task": f"What does item {n} of shelf {wanted[2]} cost?", "type": "shop", "criteria": "a price"}
        for n in range(int(wanted[1]))
    ]
    return Reply(say=f"Here you are: {json.dumps(tasks)}")


def tiny(root: Path, url: str, *more: str, command: str = f"[{sys.executable},{SERVER},stdio]") -> list[str]:
    return [
        *("+experiment=mcp_rl", f"root={root}", f"environment.command={command}", "model=tiny"),
        *(f"flow.author.url={url}", "flow.author.retry_for=1", "flow.count=10", "rounds=1"),
        *("collect.scenarios=4", "collect.group_size=2", "algorithm.minibatches=1", "agent.max_turns=2"),
        *("agent.max_tokens=8", "filter=everything", *more),
    ]


def generate(root: Path, url: str, *more: str, **options: str):
    """Run the stage `generate`. Return its artifact and status."""
    spec = compose(tiny(root, url, *more, **options))
    flow = spec.flow.arguments
    request = Requests(spec).generate_tasks(
        flow["author"], count=flow["count"], about=flow["about"], difficulties=flow["difficulties"]
    )
    return run_stage(request, Context.at(root))


def test_a_run_writes_tasks_plays_judges_and_trains(tmp_path, run):
    """Afterwards the whole run is cached, the tasks too."""
    with judge_server(author) as server:
        spec = compose(tiny(tmp_path, server.url))
        assert run(spec)["rounds"] == 1
        questions = [bool(WANTED.search(request.prompt)) for request in server.requests]
        assert sum(questions) == 5  # one for each difficulty
        assert not all(questions)  # the others are RULER's
        planned = plan(spec)
    assert {stage.status for stage in planned.stages} == {"cached"}
    tasks = next((tmp_path / "artifacts").glob("*/tasks.json"))
    splits = [task["split"] for task in json.loads(tasks.read_text())]
    assert (splits.count("train"), splits.count("heldout")) == (5, 5)


def test_the_plan_prices_the_generation_and_starts_no_server(tmp_path):
    price = "flow.author.price={input: 2.0, output: 8.0}"
    planned = plan(compose(tiny(tmp_path, "http://127.0.0.1:9/v1", price, command="[no_such_program]")))
    first, second = planned.stages[:2]
    assert (first.label, first.status) == ("generate", "run")
    assert first.cost == pytest.approx((5 * 3000 * 2 + 10 * 100 * 8) / 1e6)  # five requests, ten tasks
    assert second.inputs == {"tasks": "generate"}
    unpriced = plan(compose(tiny(tmp_path, "http://127.0.0.1:9/v1")))
    assert unpriced.stages[0].cost is None


def test_an_interrupted_generation_asks_for_no_task_twice(tmp_path):
    silent_later = judge_server(lambda asked: author(asked) if asked.number < 3 else Reply(say="No."))
    expected = r"flow\.author: .*wrote 0 of 2 tasks of difficulty 4"
    with silent_later as server, pytest.raises(ResourceError, match=expected):
        generate(tmp_path, server.url)
    with judge_server(author) as server:
        artifact, status = generate(tmp_path, server.url)
        assert status == "ran"
        assert len(server.requests) == 2
        assert artifact.metrics["kept_answers"] == 3
        assert generate(tmp_path, server.url)[1] == "cached"
        assert len(server.requests) == 2


def test_the_key_depends_on_the_tools_and_the_author_but_not_on_places(tmp_path):
    def key(*more: str, url: str = "http://127.0.0.1:9/v1") -> str:
        spec = compose(tiny(tmp_path, url, *more))
        flow = spec.flow.arguments
        names = ("count", "about", "difficulties")
        request = Requests(spec).generate_tasks(flow["author"], **{name: flow[name] for name in names})
        return request_key(request, Context.at(tmp_path))

    assert key() == key("seed=1", "environment.timeout=5", "algorithm.learning_rate=1e-3", url="http://127.0.0.1:8/v1")
    others = ["flow.about=a shop", "flow.count=20", "flow.author.model=other", "environment.tools=[price]"]
    assert len({key(), *(key(other) for other in others)}) == 5


def test_servers_and_authors_that_fail_are_named(tmp_path):
    empty = tmp_path / "empty.py"
    empty.write_text(EMPTY)
    with judge_server(author) as server:
        with pytest.raises(ResourceError, match=r"environment\.command: no_such_program: .*cannot start the program"):
            generate(tmp_path, server.url, command="[no_such_program]")
        with pytest.raises(ResourceError, match=r"environment\.command: the MCP server .* failed to open a session"):
            generate(tmp_path, server.url, command=f"[{sys.executable},-c,'raise SystemExit(3)']")
        with pytest.raises(SpecError, match=r"environment\.tools: no tools: the server lists none"):
            generate(tmp_path, server.url, command=f"[{sys.executable},{empty}]")
        assert not server.requests
        with pytest.raises(ResourceError, match=r"flow\.author.*does not exist"):
            generate(tmp_path, server.url, "flow.author.model=unknown")
    unwilling = judge_server(lambda asked: Reply(say="I would rather not."))
    with (
        unwilling as server,
        pytest.raises(ResourceError, match=r"flow\.author: .* wrote 0 of 2 tasks of difficulty 1"),
    ):
        generate(tmp_path, server.url)
    with pytest.raises(ResourceError, match=r"flow\.author: "):
        generate(tmp_path, "http://127.0.0.1:9/v1")


REFUSED = [
    ("collect.scenarios=6", "collect.scenarios: 6 scenarios: of flow.count=10 tasks, 5 are train"),
    ("evaluate.scenarios=6", "evaluate.scenarios: 6 scenarios: of flow.count=10 tasks, 5 are held out"),
    ("warmup=sft", "warmup: generated tasks have no solutions"),
    ("flow.difficulties=[]", "flow.difficulties"),
]


def test_settings_that_exclude_generated_tasks_are_refused(tmp_path):
    nowhere = "http://127.0.0.1:9/v1"
    cases = [(override, re.escape(message)) for override, message in REFUSED]
    assert wrong_refusals(cases, lambda override: plan(compose(tiny(tmp_path, nowhere, override)))) == []
    tasks = CODE / "tests" / "environments" / "tasks.json"
    with pytest.raises(SpecError, match=r"environment: .*Mcp has scenarios of its own, and flow=mcp_rl writes them"):
        compose(tiny(tmp_path, nowhere, f"environment.scenarios={tasks}"))


def test_an_mcp_server_without_tasks_needs_the_flow(tmp_path):
    line = ["environment=mcp", f"environment.command=[{sys.executable},{SERVER},stdio]", f"root={tmp_path}"]
    with pytest.raises(SpecError, match=r"environment\.scenarios: null: no tasks; .*flow=mcp_rl"):
        compose([*line, "environment.scenarios=null"])
