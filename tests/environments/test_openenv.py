"""OpenEnv client against a server with its protocol, and against the server of the package if it is installed.

The package cannot be installed beside Espalier (it wants another huggingface_hub): OPENENV_PYTHON names the interpreter
of an environment that has it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from components.environments.adapters.openenv import OpenEnv
from components.environments.adapters.openenv_messages import render_fields
from components.environments.tools import call
from components.errors import EnvironmentFailed, EnvironmentUnavailable, ResourceError, SpecError
from tests.environments import checks
from tests.http_server import HttpServer

pytestmark = pytest.mark.timeout(1800)
SERVER = str(Path(__file__).with_name("openenv_server.py"))


@contextmanager
def serving(kind: str, real: bool = False):
    """Start a server on a free port; yield its URL."""
    python = sys.executable
    if real:
        python = os.environ.get("OPENENV_PYTHON", sys.executable)
        if python == sys.executable and importlib.util.find_spec("openenv") is None:
            pytest.skip("openenv is not installed; OPENENV_PYTHON may name an interpreter that has it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, SERVER, str(port), kind, *(["real"] if real else [])])
    try:
        for _ in range(2400):
            with socket.socket() as probe:
                if process.poll() is not None or probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=[False, True], ids=["ours", "real"])
def words(request):
    with serving("words", request.param) as url:
        yield url


@pytest.fixture(scope="module", params=[False, True], ids=["ours", "real"])
def numbers(request):
    with serving("numbers", request.param) as url:
        yield url


@pytest.fixture(scope="module", params=[False, True], ids=["ours", "real"])
def tools(request):
    with serving("tools", request.param) as url:
        yield url


def small(url, **arguments) -> OpenEnv:
    return OpenEnv("guess", url, **{"train": 4, "heldout": 2, "patience": 60.0, **arguments})


def right(scenario) -> int:
    return random.Random(scenario.input["seed"]).randrange(1, 21)


def fit(scenario) -> bool:
    """Return True for scenarios at which the server does not fail."""
    return right(scenario) not in (13, 14)


def play(environment, actions):
    """Return the tools, the first messages and the steps of an episode. actions: function of the scenario."""

    async def episode():
        try:
            offered = await environment.tools()
            scenario = next(candidate for candidate in environment.scenarios("train") if fit(candidate))
            first = await environment.reset(scenario)
            return offered, first, [await environment.step(message) for message in actions(scenario)]
        finally:
            await environment.close()

    return asyncio.run(episode())


def say(text):
    return {"role": "assistant", "content": str(text)}


def text_of(step):
    return step.observation[0]["content"]


def test_plain_messages_are_text_actions(words):
    environment = small(words)
    offered, first, steps = play(environment, lambda scenario: [say(right(scenario) - 21), say(right(scenario))])
    assert first[1]["content"] == "Guess a number from 1 to 20."
    assert text_of(steps[0]) == "higher"
    assert (steps[0].reward, steps[0].done) == (0.0, False)
    assert (steps[1].reward, steps[1].done) == (1.0, True)
    assert steps[1].info == {"success": True, "progress": 1.0, "return": 1.0, "steps": 2, "invalid_actions": 0}
    assert list(offered[0]["function"]["parameters"]["properties"]) == ["message"]


def test_structured_actions_are_one_tool_with_the_servers_schema(numbers):
    environment = small(numbers)
    junk = [action for action in checks.JUNK if len(str(action)) < 1000]

    def actions(scenario):
        wrong = [call("act", {"number": "many"}), call("act", {}), call("act", {"number": 1, "more": 2}), say(3)]
        return [*wrong, *junk, call("act", {"number": right(scenario), "metadata": {"reward": 9}})]

    offered, _, steps = play(environment, actions)
    function = offered[0]["function"]
    assert (function["name"], function["parameters"]["required"]) == ("act", ["number"])
    assert "metadata" not in function["parameters"]["properties"]
    assert text_of(steps[1]).startswith("error: Invalid message; number: Field required")
    assert text_of(steps[3]) == "error: act by a tool: act"
    assert steps[-1].info["success"] is True
    assert steps[-1].info["invalid_actions"] == len(steps) - 1


def test_servers_with_tool_call_actions(tools):
    offered, _, steps = play(
        small(tools), lambda scenario: [call("guess", {"number": -5}), call("guess", {"number": right(scenario)})]
    )
    assert [tool["function"]["name"] for tool in offered] == ["guess"]
    assert text_of(steps[0]) == "higher"
    assert text_of(steps[1]) == "right"
    assert steps[1].info["success"] is True


def test_episodes_are_reproducible_and_instances_isolated(words):
    async def both():
        environments = [small(words), small(words)]
        scenarios = environments[0].scenarios("train")[:2]
        try:
            hints_seen = []
            for environment, scenario in zip(environments, scenarios, strict=True):
                await environment.reset(scenario)
            for number in range(1, 9):
                pair = [(await environment.step(say(number))).observation for environment in environments]
                hints_seen.append([messages[0]["content"] for messages in pair])
            return scenarios, hints_seen
        finally:
            for environment in environments:
                await environment.close()

    scenarios, hints_seen = asyncio.run(both())
    for index, scenario in enumerate(scenarios):
        hints = ["right" if n == right(scenario) else "higher" if right(scenario) > n else "lower" for n in range(1, 9)]
        assert [pair[index] for pair in hints_seen][: hints.index("right") if "right" in hints else 8] == hints[
            : hints.index("right") if "right" in hints else 8
        ]


def test_a_large_observation_needs_a_larger_limit():
    with serving("screens") as url:
        with pytest.raises(EnvironmentFailed, match=r"a message of more than 4 MB \(environment.max_reply\)"):
            play(small(url), lambda scenario: [])
        assert len(play(small(url, max_reply=6), lambda scenario: [])[1][1]["content"]) > 5 << 20


def test_episode_ends_after_max_steps(words):
    _, _, steps = play(small(words, max_steps=2), lambda scenario: [say(right(scenario) + 1 % 20)] * 2 + [say(1)])
    assert [step.done for step in steps] == [False, True, True]
    assert text_of(steps[2]) == "error: the episode is over"


def test_server_error_at_an_action(words):
    with pytest.raises(EnvironmentFailed, match=r"failed at an action: 13 is unlucky"):
        play(small(words), lambda _: [say(13)])
    _, _, steps = play(small(words, step_errors="tell"), lambda scenario: [say(13), say(right(scenario))])
    assert text_of(steps[0]) == "error: 13 is unlucky"
    assert steps[1].info == {"success": True, "progress": 1.0, "return": 1.0, "steps": 2, "invalid_actions": 1}


def test_full_server_is_retried(words):
    async def many():
        first = [small(words) for _ in range(3)]
        last = small(words, patience=0.3)
        scenario = first[0].scenarios("train")[0]
        try:
            for environment in first:
                await environment.reset(scenario)
            with pytest.raises(EnvironmentUnavailable, match=r"accepts no connection: .*collect.concurrency"):
                await last.reset(scenario)
            await last.close()
            last.patience = 60.0
            waiting = asyncio.create_task(last.reset(scenario))
            await asyncio.sleep(0.2)
            await first[0].close()
            return await waiting
        finally:
            for environment in [*first, last]:
                await environment.close()

    assert asyncio.run(many())[1]["content"].startswith("Guess")


def test_server_exit_fails_the_episode():
    with serving("words") as url:
        with pytest.raises(EnvironmentUnavailable, match="closed the connection"):
            play(small(url), lambda _: [say(14)])
        with pytest.raises(EnvironmentUnavailable, match="cannot be reached"):
            play(small(url, patience=0.3), lambda _: [])


@contextmanager
def answering(schema: int, ws: int):
    """A server that answers with a status to who asks for the schema, and to who wants a connection; its URL."""

    def answer(method, path, body, headers):
        return ws if path == "/ws" else schema, {"action": {"properties": {"message": {"type": "string"}}}}

    with HttpServer(answer) as server:
        yield server.url


def test_overloaded_server_is_classified_as_away(subtests):
    """Other statuses are permanent failures."""
    for where in ["schema", "ws"]:
        for code in [429, 502, 503, 504, 403, 500]:
            with subtests.test(code=code, where=where):
                statuses = {"schema": 200, "ws": 200, where: code}
                with answering(**statuses) as url, pytest.raises(EnvironmentFailed, match=f"HTTP {code}") as caught:
                    play(small(url, patience=0.1), lambda _: [])
                assert type(caught.value) is (
                    EnvironmentUnavailable if code in (429, 502, 503, 504) else EnvironmentFailed
                )


def test_overloaded_server_is_retried(words, monkeypatch):
    left = [503, 503]
    real = httpx.AsyncClient.get

    async def get(client, address):
        return httpx.Response(left.pop()) if left else await real(client, address)

    monkeypatch.setattr(httpx.AsyncClient, "get", get)
    _, first, _ = play(small(words), lambda _: [])
    assert first[1]["content"].startswith("Guess")


def test_server_of_another_kind_is_reported(tmp_path):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(EnvironmentFailed, match=r"schema: the server timed out after 0\.3 s"):
            play(small(url, timeout=0.3, patience=0.0), lambda _: [])


def test_configuration_errors_are_named_and_the_key_has_no_url(monkeypatch):
    with pytest.raises(SpecError, match=r"environment.url: expected an address such as http://127.0.0.1:8000"):
        small("ftp://there")
    with pytest.raises(SpecError, match=r"environment.url: expected an address without user and password"):
        small("http://:secret@there")
    arguments = {"name": "guess", "url": "http://a", "timeout": 1.0, "patience": 2.0, "max_reply": 9, "success": 3.0}
    assert OpenEnv.key_arguments(arguments) == {"name": "guess", "success": 3.0}
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(ResourceError, match=r"pip install -e '\.\[openenv\]'"):
        small("http://there")


def test_observations_are_rendered():
    assert render_fields({"message": "hello", "legal": None, "note": ""}) == "hello"
    assert render_fields({"board": [1, 2], "turn": "X"}) == "board: [1, 2]\nturn: X"
