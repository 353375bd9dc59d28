"""Environments over OpenEnv's protocol: plain HTTP and WebSocket requests, Espalier's client of it, and the package.

The package cannot be installed beside Espalier: OPENENV_PYTHON names the interpreter of an environment that has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("websockets")
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from components.environments.adapters.openenv import OpenEnv
from components.inference.connection import MAX_BODY_BYTES
from components.trajectories.schema import Scenario
from flows.interop.listening import serving
from flows.interop.openenv import create_app
from flows.interop.sessions import SessionLimits
from flows.interop.source import load
from tests.conformance.openenv_environment import action_of, ask, compare, python, request_of
from tests.conformance.reference_episodes import overrides_of, reference
from tests.flows.malformed_bodies import malformed_bodies

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def urls():
    """A server of an environment with tools, and of one with text. Episodes over HTTP stay open until they are idle."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(serving(create_app(load(overrides_of(name)), SessionLimits(sessions=64))))
            for name in ("shop", "maze")
        }


@pytest.fixture
def socket(urls):
    """`exchange(TYPE, data)` over a WebSocket to the shop; the data of the response."""
    with connect(urls["shop"].replace("http", "ws") + "/ws") as connection:

        def exchange(kind: str, data=None) -> dict:
            connection.send(json.dumps({"type": kind, "data": data or {}}))
            return json.loads(connection.recv())

        exchange.connection = connection
        yield exchange


def test_an_episode_over_a_websocket_has_the_rewards_of_the_environment(socket):
    solved = reference("shop", (1,))[0]
    start = socket("reset", {"seed": 1})["data"]
    assert (start["reward"], start["done"]) == (None, False)
    assert start["metadata"]["scenario"] == solved.scenario
    assert start["metadata"]["messages"] == list(solved.first)
    steps = [socket("step", action_of(action))["data"] for action in solved.actions]
    assert [step["reward"] for step in steps] == [0.0] * (len(steps) - 1) + [solved.reward]
    assert [step["done"] for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1]["metadata"]["info"]["success"]
    state = socket("state")["data"]
    assert (state["step_count"], state["done"], state["reward"]) == (len(steps), True, 1.0)


WRONG = [
    ("step", {"message": "hello"}, "EXECUTION_ERROR", "step before reset"),
    ("reset", {"scenario": "shop-0"}, "EXECUTION_ERROR", "shop has no such scenario"),
    ("reset", {"seed": -1}, "VALIDATION_ERROR", "greater than or equal to 0"),
    ("reset", {"sed": 1}, "VALIDATION_ERROR", "Extra inputs"),
    ("step", {"number": 3}, "VALIDATION_ERROR", "Extra inputs"),
    ("step", {}, "VALIDATION_ERROR", "no action"),
    ("step", {"type": "call_tool"}, "VALIDATION_ERROR", "call_tool has no tool_name"),
    ("step", {"tool_name": "refund", "message": "so"}, "VALIDATION_ERROR", "together"),
    ("step", {"tool_calls": [{}]}, "EXECUTION_ERROR", r"tool_calls[0]"),
    ("jump", {}, "UNKNOWN_TYPE", "jump"),
]
"""Type and data of a request, the code of its error, and what its message has."""


def test_a_wrong_request_has_an_error_code_and_a_message_and_the_session_goes_on(socket):
    for kind, data, code, message in WRONG:
        response = socket(kind, data)
        assert (response["type"], response["data"]["code"]) == ("error", code)
        assert message in json.dumps(response["data"])
    assert socket("reset", {"seed": 0})["type"] == "observation"
    assert socket("step", {"message": "bye"})["data"]["done"]
    assert "after the end" in socket("step", {"message": "bye"})["data"]["message"]
    socket.connection.send("{")
    assert json.loads(socket.connection.recv())["data"]["code"] == "INVALID_JSON"
    socket.connection.send(b"\xff\xfe")
    assert json.loads(socket.connection.recv())["data"]["code"] == "INVALID_JSON"


def test_tools_are_listed_without_a_step(socket):
    listed = socket("step", {"type": "list_tools"})["data"]["observation"]["tools"]
    assert "find_order" in [tool["name"] for tool in listed]
    assert listed[0]["input_schema"]["type"] == "object"


def test_the_server_chooses_the_ids_of_http_episodes(urls):
    with httpx.Client(base_url=urls["maze"]) as http:
        first = http.post("/reset", json={"seed": 0}).json()
        other = http.post("/reset", json={"seed": 1}).json()
        a, b = (start["metadata"]["episode_id"] for start in (first, other))
        assert first["observation"] != other["observation"]
        stepped = http.post("/step", json={"action": {"message": "up"}, "episode_id": b}).json()
        assert (stepped["reward"], stepped["done"]) == (0.0, False)
        assert http.get("/state", params={"episode_id": b}).json()["step_count"] == 1
        assert http.get("/state", params={"episode_id": a}).json()["step_count"] == 0
        assert http.post("/reset", json={"seed": 2, "episode_id": a}).json()["metadata"]["episode_id"] == a
        assert [http.delete(f"/episodes/{id}").status_code for id in (a, b, b)] == [200, 200, 404]
        for guess in (b, "default", "a", "http/a"):
            refused = http.post("/reset", json={"episode_id": guess})
            assert (refused.status_code, "no such episode" in refused.json()["detail"]) == (409, True)
            assert http.post("/step", json={"action": {"message": "up"}, "episode_id": guess}).status_code == 409
            assert http.get("/state", params={"episode_id": guess}).json()["scenario"] is None
        assert http.post("/step", json={"action": {"message": "up"}}).status_code == 422  # without an id


def test_a_connection_cannot_be_used_over_http(urls):
    created = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    id = httpx.post(urls["shop"] + "/mcp", json=created).json()["result"]["session_id"]
    with connect(f"{urls['shop'].replace('http', 'ws')}/ws?session_id={id}") as connection:
        connection.send(json.dumps({"type": "reset", "data": {}}))
        connection.recv()
        for kind, body in {"reset": {}, "step": {"action": {"message": "hello"}}}.items():
            assert httpx.post(f"{urls['shop']}/{kind}", json={"episode_id": id, **body}).status_code == 409
        assert httpx.delete(f"{urls['shop']}/episodes/{id}").status_code == 404
    while httpx.delete(f"{urls['shop']}/episodes/{id}").status_code == 404:  # until the connection has ended
        time.sleep(0.05)


HTTP_REQUESTS = {
    "/reset": {"seed": 0, "scenario": "shop-0", "episode_id": "x"},
    "/step": {
        "action": {"type": "call_tool", "tool_name": "find_order", "arguments": {"order": "A"}},
        "episode_id": "ID",
        "timeout_s": 5.0,
    },
    "/mcp": {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "find_order", "arguments": {"order": "A"}, "session_id": "ID"},
    },
}
"""Requests whose fields are replaced. ID stands for an open episode."""


@pytest.mark.parametrize("path", HTTP_REQUESTS)
def test_a_malformed_body_is_never_a_server_error(urls, path):
    with httpx.Client(base_url=urls["shop"], timeout=60) as http:
        id = http.post("/reset", json={"seed": 0}).json()["metadata"]["episode_id"]
        text = json.dumps(HTTP_REQUESTS[path]).replace("ID", id)
        bodies = list(malformed_bodies(json.loads(text)))
        replies = []
        for body in bodies:
            replies.append(http.post(path, content=body))
            if path == "/reset" and replies[-1].status_code == 200:
                http.delete(f"/episodes/{replies[-1].json()['metadata']['episode_id']}")
        http.delete(f"/episodes/{id}")
    assert len(bodies) > 120
    assert {reply.status_code for reply in replies} <= {200, 409, 413, 422, 504}  # 504: a tiny timeout_s


def test_malformed_messages_over_a_websocket_leave_the_connection_open(socket):
    messages = list(malformed_bodies({"type": "reset", "data": {"seed": 0, "scenario": "shop-0"}}))
    messages += malformed_bodies({"type": "step", "data": {"tool_name": "find_order", "arguments": {"order": "A"}}})
    messages += malformed_bodies({"type": "mcp", "data": HTTP_REQUESTS["/mcp"]})
    for message in messages:
        if (b'"close"' in message) or not (text := message.decode(errors="ignore")):
            continue
        socket.connection.send(text)
        assert json.loads(socket.connection.recv())["type"] in ("error", "observation", "mcp", "state")


def test_the_size_of_a_message_is_limited(urls, socket):
    assert httpx.post(urls["shop"] + "/reset", content=iter([b" " * 2**20] * 5)).status_code == 413
    assert httpx.post(urls["shop"] + "/mcp", content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413
    socket.connection.send(" " * (MAX_BODY_BYTES + 1))
    with pytest.raises(ConnectionClosed) as caught:
        socket.connection.recv()
    assert caught.value.rcvd.code == 1009


def test_sessions_beyond_the_maximum_are_refused():
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(create_app(load(["environment=guess"]), SessionLimits(sessions=4))))
        address = url.replace("http", "ws") + "/ws"
        open_connections = [stack.enter_context(connect(address)) for _ in range(4)]
        for connection in open_connections:
            connection.send('{"type": "state"}')
            connection.recv()
        refused = json.loads(stack.enter_context(connect(address)).recv())
        assert refused["data"]["code"] == "CAPACITY_REACHED"
        assert httpx.post(url + "/reset").status_code == 503


def test_an_idle_connection_is_closed_with_a_reason():
    with (
        serving(create_app(load(["environment=guess"]), SessionLimits(idle=0.5))) as url,
        connect(url.replace("http", "ws") + "/ws") as connection,
    ):
        response = json.loads(connection.recv())
        assert response["data"]["code"] == "SESSION_ERROR"
        assert "no message for 0.5 s" in response["data"]["message"]


def test_other_hosts_and_web_pages_are_refused(urls):
    assert httpx.get(urls["shop"] + "/health", headers={"Host": "evil.example"}).status_code == 421
    assert httpx.post(urls["shop"] + "/reset", headers={"Origin": "http://evil.example"}).status_code == 403
    with pytest.raises(InvalidStatus, match="403"):
        connect(urls["shop"].replace("http", "ws") + "/ws", origin="http://evil.example")


def test_json_rpc_lists_and_calls_tools_in_a_session(urls):
    solved = reference("shop", (0,))[0]

    def rpc(method: str, **params):
        request = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
        return httpx.post(urls["shop"] + "/mcp", json=request).json()

    id = rpc("openenv/session/create")["result"]["session_id"]
    function = solved.actions[0]["tool_calls"][0]["function"]
    call = {"name": function["name"], "arguments": json.loads(function["arguments"]), "session_id": id}
    assert rpc("tools/call", **call)["error"]["message"].startswith("step before reset")
    with connect(f"{urls['shop'].replace('http', 'ws')}/ws?session_id={id}") as connection:
        connection.send(json.dumps({"type": "reset", "data": {"seed": 0}}))
        connection.recv()
        assert rpc("tools/call", **call)["result"]["data"] == solved.observations[0][0]["content"]
        assert "error" in rpc("openenv/session/close", session_id=id)  # a connection uses it
    assert rpc("tools/list", session_id="x")["error"]["code"] == -32602
    assert rpc("jump")["error"]["code"] == -32601
    assert httpx.post(urls["shop"] + "/mcp", json={}).json()["error"]["code"] == -32600


@pytest.mark.parametrize("name", ["shop", "maze"])
def test_espaliers_own_client_plays_a_served_environment(urls, name):
    solved, wrong = reference(name, (1,))

    async def play(episode) -> list:
        client = OpenEnv(name, urls[name], system="", max_steps=100)
        scenario = Scenario("x", {"seed": episode.seed}, "train")
        try:
            first = await client.reset(scenario)
            actions = [said(action) for action in episode.actions] if name == "maze" else episode.actions
            return [first, [await client.step(action) for action in actions]]
        finally:
            await client.close()

    first, steps = asyncio.run(play(solved))
    assert first[0]["content"] == "\n\n".join(message["content"] for message in solved.first)
    assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert steps[-1].done
    assert steps[-1].info["success"]
    assert steps[0].observation[0]["content"] == solved.observations[0][0]["content"]
    assert sum(step.reward for step in asyncio.run(play(wrong))[1]) == 0.0


def said(action: dict) -> dict:
    """The message with the text of a call of `act`: a served environment with text actions takes messages."""
    calls = action.get("tool_calls") or []
    content = json.loads(calls[0]["function"]["arguments"])["action"] if calls else action["content"]
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="module")
def interpreter():
    found = python()
    if found is None:
        pytest.skip("openenv is not installed; OPENENV_PYTHON may name an interpreter that has it")
    return found


@pytest.mark.slow
def test_the_command_openenv_validate_passes(urls, interpreter):
    line = [str(Path(interpreter).with_name("openenv")), "validate", "--url", urls["shop"]]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "Verdict: PASS" in done.stdout) == (0, True), done.stdout


def test_openenvs_clients_play_episodes_with_the_rewards_of_the_environment(urls, interpreter):
    episodes = [*reference("shop", (2,)), *reference("maze", (2,))]
    tools = [episode for episode in episodes if episode.environment == "shop"]
    requests = [request_of(urls[episode.environment], episode) for episode in episodes]
    requests += [request_of(urls["shop"], episode, "mcp") for episode in tools]
    unreset = {**requests[0], "reset": None}
    answer = ask(interpreter, list(urls.values()), [*requests, unreset])
    assert [report["passed"] for report in answer["validation"]] == [True, True]
    reports = answer["episodes"]
    assert [compare(episode, report) for episode, report in zip(episodes, reports, strict=False)] == [""] * 4
    for episode, report in zip(tools, reports[4:6], strict=True):
        assert tuple(report["tools"]) == episode.tools
        assert sum(step["reward"] for step in report["steps"]) == episode.reward
    assert "step before reset" in reports[6]["error"]
    assert "EXECUTION_ERROR" in reports[6]["error"]


def test_serving_leaves_the_event_loops_of_the_process_alone(urls):
    async def process() -> int:
        return await (await asyncio.create_subprocess_exec(sys.executable, "-c", "")).wait()

    assert asyncio.run(process()) == 0
