"""MCP servers as environments: a real server over stdio and HTTP; sessions, failures, judges."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.environments import tool_tasks
from components.environments.adapters import mcp as module
from components.environments.adapters import mcp_session
from components.environments.adapters.mcp import Mcp
from components.environments.adapters.mcp_judge import Judge
from components.environments.adapters.mcp_session import Address, McpSession
from components.environments.adapters.mcp_tools import Tool
from components.environments.tools import call
from components.errors import EnvironmentFailed, EnvironmentUnavailable, JudgeError, ResourceError, SpecError
from tests.environments import checks
from tests.http_server import HttpServer
from tests.inference.faulty import Line, hang_up, status

pytest.importorskip("mcp")
pytestmark = pytest.mark.timeout(1800)  # seconds; servers start slowly on a busy machine
SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = [sys.executable, SERVER, "stdio"]
TASKS = json.loads(Path(__file__).with_name("tasks.json").read_text())


async def right(episode) -> bool:
    """Inspect the basket."""
    assert episode.call is not None
    inside = [line for line in (await episode.call("look", {})).splitlines() if line]
    return sorted(inside) == episode.scenario.input["data"]["basket"] and "dollars" in episode.answer


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(TASKS))
    return str(path)


@contextmanager
def over_http():
    """Start the server on a free port; yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(6000):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def play(environment, *actions, number=0):
    """Return the tools and steps of an episode; the environment stays open until the loop ends, as in collectors."""

    async def episode():
        try:
            tools = await environment.tools()
            scenario = environment.scenarios("train")[number]
            await environment.reset(scenario)
            messages = [action(scenario) if callable(action) else action for action in actions] or environment.solve(
                scenario
            )
            return tools, [await environment.step(message) for message in messages]
        finally:
            await environment.close()

    return asyncio.run(episode())


def text_of(step) -> str:
    return step.observation[0]["content"]


def say(text):
    return {"role": "assistant", "content": text}


# --- sessions -------------------------------------------------------------------------------------------------------


def test_tools_come_from_the_server_and_solutions_succeed(file):
    tools, steps = play(Mcp(file, command=STDIO, success=right))
    names = {tool["function"]["name"]: tool["function"] for tool in tools}
    assert names["price"]["description"] == "price of an item in dollars"
    assert names["add"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert "shelf_stock_all" in names  # a name that OpenAI's form does not know
    assert steps[-1].done
    assert steps[-1].info == {"success": True, "invalid_actions": 0, "tool_errors": 0, "calls": 2}


def test_each_episode_has_its_own_session(file):
    async def episodes(environment):
        first = environment.scenarios("train")[0]
        results = []
        try:
            await environment.tools()
            for _ in range(2):
                await environment.reset(first)
                await environment.step(call("add", {"item": "lamp", "number": 2}))
                results.append(text_of(await environment.step(call("add", {"item": "chair", "number": 1}))))
        finally:
            await environment.close()
        return results

    fresh = ["3 in the basket"] * 2
    assert asyncio.run(episodes(Mcp(file, command=STDIO))) == fresh
    assert asyncio.run(episodes(Mcp(file, command=STDIO, sessions="shared"))) == [fresh[0], "6 in the basket"]
    with over_http() as url:
        assert asyncio.run(episodes(Mcp(file, url=url))) == fresh
        _, steps = play(Mcp(file, url=url, success=right))
        assert steps[-1].info["success"] is True


def test_concurrent_episodes_are_isolated(file):
    async def all_at_once():
        environments = [Mcp(file, command=STDIO, success=right) for _ in range(3)]
        scenario = environments[0].scenarios("train")[0]

        async def episode(environment):
            try:
                await environment.reset(scenario)
                return [await environment.step(action) for action in environment.solve(scenario)][-1].info
            finally:
                await environment.close()

        return await asyncio.gather(*map(episode, environments))

    assert [info["success"] for info in asyncio.run(all_at_once())] == [True] * 3


# --- what a model says ----------------------------------------------------------------------------------------------


def test_invalid_calls_are_reported_and_counted(file):
    junk = [action for action in checks.JUNK if action.get("tool_calls")]
    wrong = [
        call("price", {}),
        call("price", {"item": 3}),
        call("add", {"item": "lamp", "number": "two"}),
        call("no_such", {}),
    ]
    _, steps = play(Mcp(file, command=STDIO, success=right), *wrong, *junk, call("price", {"item": "moon"}), say("35"))
    assert "'item' is a required property" in text_of(steps[0])
    assert text_of(steps[1]).startswith("error: price: item: 3 is not of type 'string'")
    assert text_of(steps[3]).startswith("error: no tool no_such; there are price, add")
    assert "no item moon" in text_of(steps[-2])  # what the tool itself says, marked as its error
    assert text_of(steps[-2]).startswith("error: ")
    info = steps[-1].info
    assert info["invalid_actions"] == len(wrong) + len(junk)
    assert (info["tool_errors"], info["calls"], info["success"]) == (1, 1, False)


def test_only_listed_tools_are_offered(file):
    tools, steps = play(Mcp(file, command=STDIO, tools=["price", "shelf.stock/all"]), call("shelf_stock_all", {}))
    assert [tool["function"]["name"] for tool in tools] == ["price", "shelf_stock_all"]
    assert text_of(steps[0]) == "lamp, kettle, chair"
    with pytest.raises(SpecError, match=r"no tool 'prise'.*Did you mean 'price'"):
        play(Mcp(file, command=STDIO, tools=["prise"]))


# --- servers that fail ----------------------------------------------------------------------------------------------


def test_server_crash_fails_the_episode_with_masked_stderr(file, monkeypatch):
    monkeypatch.setenv("SHELF_KEY", "s3cret-value")
    with pytest.raises(EnvironmentFailed) as caught:
        play(Mcp(file, command=STDIO, variables=["SHELF_KEY"]), call("die", {}))
    assert "out of paper" in str(caught.value)
    assert "s3cret-value" not in str(caught.value)


def test_call_timeout_fails_the_episode(file):
    with pytest.raises(EnvironmentFailed, match=r"timed out at slow after 2 s \(environment.timeout\)"):
        play(Mcp(file, command=STDIO, timeout=2.0), call("slow", {"seconds": 60}))


def test_start_times_out(file):
    silent = [sys.executable, "-c", "import time; print('hm', flush=True); time.sleep(60)"]
    with pytest.raises(EnvironmentFailed, match=r"did not start within 0\.5 s \(environment.start_timeout\)"):
        play(Mcp(file, command=silent, start_timeout=0.5))


def test_unknown_command_is_a_resource_error(file):
    with pytest.raises(ResourceError, match=r"environment.command: no-such-program"):
        play(Mcp(file, command=["no-such-program"]))


# A server over HTTP that is only away


@contextmanager
def line():
    """To a server, which no stream of its own reaches; where an environment finds it."""
    with over_http() as url, Line(url) as between:
        meet = between.meet
        between.meet = lambda handler: status(405)(handler) if handler.command == "GET" else meet(handler)
        yield between, between.url.replace("/v1", "/mcp")


FAULTS = [*(status(code) for code in (429, 502, 503, 504, 401, 500)), hang_up]
AWAY = [EnvironmentUnavailable] * 4 + [EnvironmentFailed] * 2 + [EnvironmentUnavailable]


def test_transient_http_failures_are_classified_as_away(file):
    """At the start of a session, during it, and after the server lost it."""

    async def scene():
        environment = Mcp(file, url=url)
        scenario = environment.scenarios("train")[0]
        results = []
        for fault in FAULTS:
            between.faults = iter([fault])  # what comes next would go well
            with pytest.raises(EnvironmentFailed) as opening:
                await environment.reset(scenario)
            await environment.reset(scenario)
            between.faults = iter([fault])
            with pytest.raises(EnvironmentFailed) as calling:
                await environment.step(call("price", {"item": "lamp"}))
            await environment.close()
            results.append((type(opening.value), type(calling.value)))
        await environment.reset(scenario)
        between.faults = iter([status(404)])
        with pytest.raises(EnvironmentUnavailable, match="the session"):
            await environment.step(call("price", {"item": "lamp"}))
        await environment.close()
        return results

    with line() as (between, url):
        assert asyncio.run(scene()) == list(zip(AWAY, AWAY, strict=True))


def test_refused_connection_is_classified_as_away(file):
    with pytest.raises(EnvironmentUnavailable, match=r"the MCP server http://127.0.0.1:1/mcp"):
        play(Mcp(file, url="http://127.0.0.1:1/mcp"))


def test_exited_program_is_not_classified_as_away(file):
    with pytest.raises(EnvironmentFailed) as caught:
        play(Mcp(file, command=STDIO), call("die", {}))
    assert type(caught.value) is EnvironmentFailed


def test_invalid_tool_schema_is_named_and_can_be_excluded(file):
    message = r"environment.tools: the tool 'price' of the server has an invalid input schema"
    with pytest.raises(SpecError, match=message):
        play(Mcp(file, command=[*STDIO, "broken"]))
    tools, _ = play(Mcp(file, command=[*STDIO, "broken"], tools=["add"]))
    assert len(tools) == 1


def test_large_results_are_truncated_by_the_agent_loop(file):
    from components.rollout.observations import cleaned

    _, steps = play(Mcp(file, command=STDIO), call("huge", {"characters": 3_000_000}))
    shown, cut = cleaned(steps[0].observation, 1000)
    assert cut == 1
    assert "[cut: 3,000,000 characters, 1,000 are shown]" in shown[0]["content"]


def test_only_named_variables_reach_the_server(file, monkeypatch):
    monkeypatch.setenv("SHELF_KEY", "s3cret-value")
    ask = call("variable", {"name": "SHELF_KEY"})
    assert text_of(play(Mcp(file, command=STDIO), ask)[1][0]) == "not set"
    result = text_of(play(Mcp(file, command=STDIO, variables=["SHELF_KEY"]), ask)[1][0])
    assert result == "***", "the server has it, and what it tells of it goes nowhere"
    monkeypatch.delenv("SHELF_KEY")
    with pytest.raises(ResourceError, match="the environment variable SHELF_KEY is not set"):
        play(Mcp(file, command=STDIO, variables=["SHELF_KEY"]))


# --- success --------------------------------------------------------------------------------------------------------


@contextmanager
def model(*answers):
    """Yield URL and requests of a chat completions server that returns `answers` in turn, repeating the last."""
    asked = []

    def answer(method, path, body, headers):
        asked.append(json.loads(body))
        reply = answers[min(len(asked), len(answers)) - 1]
        reply = reply(asked[-1]) if callable(reply) else reply
        return 200, {"choices": [{"message": {"role": "assistant", "content": reply}}]}

    with HttpServer(answer) as server:
        yield f"{server.url}/v1", asked


def test_judge_sees_the_episode_and_decides_success(file):
    with model("hm", 'So: {"why": "it says 55", "success": true}') as (url, asked):
        environment = Mcp(file, command=STDIO, judge=Judge(url=url, model="m"))
        _, steps = play(environment)
    assert steps[-1].info["success"] is True
    assert steps[-1].info["why"] == "it says 55"
    shown = json.loads(asked[0]["messages"][1]["content"])
    assert shown["calls"][0] == {
        "tool": "add",
        "arguments": {"item": "lamp", "number": 1},
        "result": "1 in the basket",
        "failed": False,
    }
    assert shown["answer"] == "55 dollars."
    assert asked[0]["temperature"] == 0
    with model("no idea") as (url, _), pytest.raises(JudgeError, match="the judge m returned 'no idea'"):
        play(Mcp(file, command=STDIO, judge=Judge(url=url, model="m")))


def test_without_judge_and_function_there_is_no_success(file):
    _, steps = play(Mcp(file, command=STDIO))
    assert "success" not in steps[-1].info


# --- the file of tasks ----------------------------------------------------------------------------------------------


def test_scenarios_come_from_the_file_and_enter_the_key_by_content(file, tmp_path):
    environment = Mcp(file, command=STDIO)
    assert [scenario.difficulty for scenario in environment.scenarios("train")] == [2, 2, 3, 3, 4]
    assert len(environment.scenarios("heldout")) == 1
    assert len(Mcp(file, command=STDIO, train=2).scenarios("train")) == 2
    other = tmp_path / "elsewhere.json"
    other.write_text(json.dumps(TASKS, indent=4))
    copy = tmp_path / "server.py"
    copy.write_bytes(Path(SERVER).read_bytes())
    options = {"command": STDIO, "scenarios": file, "timeout": 1.0}
    key = Mcp.key_arguments(options)
    assert key == Mcp.key_arguments({**options, "scenarios": str(other), "timeout": 2.0})
    assert key != Mcp.key_arguments({**options, "command": [STDIO[0], str(copy), "http"]})
    changed = Mcp.key_arguments({**options, "command": [STDIO[0], str(copy), "stdio"]})
    copy.write_text("# another server")
    assert changed != Mcp.key_arguments({**options, "command": [STDIO[0], str(copy), "stdio"]})
    other.write_text(json.dumps([{**TASKS[0], "difficulty": 5}, *TASKS[1:]]))
    assert key != Mcp.key_arguments({**options, "scenarios": str(other)})


def edited(path: Path) -> None:
    path.write_text(path.read_text() + "# edited\n")


@pytest.mark.parametrize(
    ("command", "counts"),
    [
        (["python", "shelf.py"], {"shelf.py", "stock.py", "more/__init__.py", "more/deep.py"}),
        (["python", "-m", "more.deep", "--port", "1"], {"more/__init__.py", "more/deep.py", "stock.py"}),
        (["python", "-m", "more"], {"more/__init__.py", "more/__main__.py"}),
        (["./start", "now"], {"start"}),
        (["bin/start"], {"bin/start"}),
        (["python", "old.py"], {"old.py"}),
        (["venv/bin/start"], set()),
        (["npx", "shelf@1.2"], set()),
        (["python", "-m", "not_here"], set()),
    ],
)
def test_stage_key_includes_the_code_of_the_server(command, counts, tmp_path, file):
    """The key includes the named script or module with its local imports, not installed code."""
    texts = {
        "shelf.py": "import json\nimport stock\nfrom more import deep\n",
        "stock.py": "",
        "more/__init__.py": "",
        "more/__main__.py": "",
        "more/deep.py": "def f():\n    import stock\n",
        "aside.py": "",
        "old.py": "print 'not this Python'\n",
        "start": "#!/bin/sh\n",
        "bin/start": "#!/bin/sh\n",
        "venv/bin/start": "#!/there/venv/bin/python\n",
        "venv/pyvenv.cfg": "",
    }

    def options_in(folder):
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return {"command": command, "folder": str(folder), "scenarios": file}

    options = options_in(tmp_path / "one")
    key = Mcp.key_arguments(options)
    assert key == Mcp.key_arguments(options_in(tmp_path / "other")), "where it is does not count"
    changing = set()
    for name in texts:
        edited(tmp_path / "one" / name)
        changing |= {name} if Mcp.key_arguments(options) != key else set()
        (tmp_path / "one" / name).write_text(texts[name])
    assert changing == counts
    installed = Mcp.key_arguments({**options, "command": [sys.executable, *command[1:]]})["command"]
    assert installed[0] == Path(sys.executable).name


def test_invalid_file_error_names_the_place(tmp_path, subtests):
    for text, message in [
        ("no json", "is not valid JSON"),
        ("{}", "contains dict; expected a list of tasks"),
        ('[{"task": ""}]', "task 0: task: '': expected text of at least 1 character"),
        ('[{"task": "a", "difficulty": 9}]', "task 0: difficulty: 9: expected at most 5"),
        ('[{"task": "a", "level": 1}]', "task 0: level: no such key"),
        ('[{"task": "a"}, {"task": "a"}]', "task 1 has the id|task 1 duplicates"),
        ('[{"task": "a", "split": "train"}, {"task": "b"}]', "task 1 has no split, but others have"),
        ('[{"task": "a", "solution": [{"do": 1}]}]', "task 0, solution: {'do': 1}"),
    ]:
        with subtests.test(text=text):
            path = tmp_path / "tasks.json"
            path.write_text(text)
            with pytest.raises(SpecError, match=message):
                Mcp(str(path), command=STDIO)


def test_configuration_errors_are_named(file, monkeypatch):
    with pytest.raises(SpecError, match=r"set command .* or url"):
        Mcp(file)
    for address in ("http://me:secret@127.0.0.1/mcp", "http://:secret@127.0.0.1/mcp"):
        with pytest.raises(SpecError, match=r"without user and password; .*environment.headers") as caught:
            Mcp(file, url=address)
        assert "secret" not in str(caught.value)
    with pytest.raises(SpecError, match=r"environment.url: expected an address such as http://127.0.0.1:8000/mcp"):
        Mcp(file, url="http://there:port/mcp")
    with pytest.raises(SpecError, match=r"environment.variables: apply to a program"):
        Mcp(file, url="http://there/mcp", variables=["KEY"])
    with pytest.raises(SpecError, match=r"environment.headers: apply to requests to url"):
        Mcp(file, command=STDIO, headers={"Authorization": "KEY"})
    with pytest.raises(ResourceError, match=r"`python -m flows.environment scenarios` writes"):
        Mcp("nowhere.json", command=STDIO)
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ResourceError, match=r"pip install -e '\.\[mcp\]'"):
        Mcp(file, command=STDIO)


# --- tasks written by a model ---------------------------------------------------------------------------------------


def author(body) -> str:
    """Return the requested tasks with a duplicate, an invalid entry and surrounding text."""
    wanted = body["messages"][0]["content"]
    level = wanted.split(" of 5:")[0].rsplit(" ", 1)[1]
    new = [{"task": f"Task {body['seed']}-{n} at {level}", "type": "shop", "criteria": "a number"} for n in range(8)]
    return f"Here you are: {json.dumps([new[0], new[0], 'junk', *new])} Good luck."


def test_a_model_writes_tasks_of_all_difficulties(tmp_path):
    from flows.environment import scenarios

    out = tmp_path / "tasks.json"
    with model(author) as (url, asked):
        command = ["--out", str(out), "--count", "30", "--author-url", url, "--author", "m", "--about", "a shop", "--"]
        assert scenarios.main([*command, *STDIO]) == 0
        first = out.read_bytes()
        out.unlink()
        scenarios.main([*command, *STDIO])
        assert out.read_bytes() == first
    environment = Mcp(str(out), command=STDIO)
    by_split = {split: environment.scenarios(split) for split in checks.SPLITS}
    assert {split: len(scenarios) for split, scenarios in by_split.items()} == {"train": 25, "heldout": 5}
    assert {scenario.difficulty for scenario in by_split["heldout"]} == {1, 2, 3, 4, 5}
    request = asked[0]["messages"][0]["content"]
    assert "price of an item in dollars" in request
    assert "a shop" in request
    with model("I would rather not.") as (url, _), pytest.raises(EnvironmentFailed, match="wrote 0 of 1 tasks"):
        asyncio.run(tool_tasks.write_tasks(tool_tasks.Author(url=url, model="m"), [], count=1))


def test_author_server_may_require_a_header(tmp_path, monkeypatch):
    from flows.environment import scenarios

    monkeypatch.setenv("SHELF_KEY", "Bearer s3cret-value")
    out = tmp_path / "tasks.json"
    options = ["--out", str(out), "--count", "2", "--author", "m"]
    with model(author) as (url, _), line() as (between, server):
        command = [*options, "--author-url", url, "--url", server, "--header", "Authorization=SHELF_KEY"]
        assert scenarios.main(command) == 0
        assert {headers.get("authorization") for headers in between.headers} == {"Bearer s3cret-value"}
    assert len(json.loads(out.read_text())) == 2


def test_command_errors_are_named_without_secrets(tmp_path, capsys, subtests):
    from flows.environment import scenarios

    required = ["--out", str(tmp_path / "x"), "--author", "m", "--author-url", "http://there"]
    for options, message in [
        (["--url", "http://me:s3cret@there/mcp"], "--url: expected an address without user and password; .*--header"),
        (["--url", "there"], "--url: expected an address such as"),
        (["--url", "http://there", "--author-url", "http://me:s3cret@there"], "without user and password"),
        (["--url", "http://there", "--header", "Authorization: Bearer s3cret"], "--header: expected HEADER=VARIABLE"),
        (["--url", "http://there", "--header", "Authorization=Bearer s3cret"], "--header: expected HEADER=VARIABLE"),
        (["--url", "http://there", "--variable", "KEY"], "--variable requires a COMMAND"),
        (["--header", "Authorization=KEY", "--", "python"], "--header requires --url"),
    ]:
        with subtests.test(options=options):
            with pytest.raises(SystemExit):
                scenarios.main([*required, *options])
            output = capsys.readouterr().err
            assert re.search(message, output)
            assert "s3cret" not in output


def test_no_process_is_left_running(file):
    _, _ = play(Mcp(file, command=STDIO))
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    running = [
        Path(f"/proc/{child}/cmdline").read_bytes()
        for path in children
        if path.exists()
        for child in path.read_text().split()
    ]
    assert not [line for line in running if SERVER.encode() in line]
    assert module.SYSTEM


def test_missing_credentials_name_the_status_and_the_key(file):
    """The SDK says only that the server returned an error."""
    hint = r"HTTP 401; expected credentials: set environment.headers=\{Authorization: VARIABLE\}"
    with line() as (between, url):
        between.faults = iter([status(401)])
        with pytest.raises(EnvironmentFailed, match=hint):
            play(Mcp(file, url=url))


def test_structured_content_is_shown_once(subtests):
    from mcp import types

    for texts, structured, shown in [
        (["two lamps"], {"lamps": 2}, 'two lamps\n{"lamps": 2}'),
        (['{"lamps":2}'], {"lamps": 2}, '{"lamps":2}'),  # repeated as JSON
        (["lamp", "chair"], {"result": ["lamp", "chair"]}, "lamp\nchair"),  # as the SDK writes a list
        (["20"], {"result": 20}, "20"),
        (["20"], {"result": "20"}, "20"),
        (["20"], {"result": 21}, '20\n{"result": 21}'),
        ([], {"result": []}, '{"result": []}'),
        (["two lamps"], None, "two lamps"),
    ]:
        with subtests.test(texts=texts, structured=structured):
            content = [types.TextContent(type="text", text=text) for text in texts]
            assert mcp_session._text(types.CallToolResult(content=content, structured_content=structured)) == shown


@pytest.mark.parametrize(
    ("count", "size", "problem"),
    [
        (20_000, 0, "lists more than 1000 tools"),
        (0, 0, "on more than 100 pages"),
        (10, 100_000, "lists tools of more than 4194304 characters"),
    ],
    ids=["tools", "pages", "sizes"],
)
def test_a_list_of_tools_is_bounded(count, size, problem):
    from mcp import types

    tool = types.Tool(name="lookup", description="x" * size, input_schema={"type": "object"})
    page = SimpleNamespace(tools=[tool] * count, next_cursor="more")

    async def answer(*_: object) -> SimpleNamespace:
        return page

    async def listed() -> None:
        session = McpSession(Address(url="http://127.0.0.1:1/mcp"), 60.0)
        session._ask = answer
        await session.tools()

    with pytest.raises(EnvironmentFailed, match=problem):
        asyncio.run(listed())


DOUBLING = {"a0": {}, **{f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n - 1}"}] * 2} for n in range(1, 31)}}
"""Schemas each of which refers twice to the one before it."""


def test_a_schema_of_a_tool_is_bounded(subtests):
    for schema, problem in [
        ({"patternProperties": {f"a{number}": {} for number in range(20_000)}}, "more than 100 patterns"),
        ({"anyOf": [{"pattern": f"a{number}"} for number in range(101)]}, "more than 100 patterns"),
        ({"pattern": "a" * 1001}, "a pattern of more than 1000 characters"),
        ({"enum": list(range(5001))}, "more than 5000 values"),
        ({"$ref": "#/$defs/a30", "$defs": DOUBLING}, "were not done after 50000 steps"),
        ({"$ref": "#"}, "are nested too deeply"),
    ]:
        with subtests.test(schema=schema), pytest.raises(SpecError, match=problem):
            Tool("lookup", "", schema)
