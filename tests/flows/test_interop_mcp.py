"""Environments as MCP servers, used by the official Python client over streamable HTTP and stdio."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("mcp")
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError

from flows.interop.listening import serving
from flows.interop.mcp import PATH, create_mcp_app
from flows.interop.sessions import SessionLimits
from flows.interop.source import load
from tests.conformance.mcp_environment import EPISODE, play
from tests.conformance.reference_episodes import overrides_of, reference
from tests.flows.malformed_bodies import malformed_bodies

pytestmark = pytest.mark.timeout(1800)
CODE = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def url():
    with serving(create_mcp_app(load(overrides_of("shop")), SessionLimits(sessions=4))) as address:
        yield address + PATH


def text(result) -> str:
    return result.content[0].text


def test_episodes_in_sessions_side_by_side_have_the_rewards_of_the_environment(url):
    async def play_all() -> list[str]:
        return await asyncio.gather(*(play(url, episode) for episode in reference("shop")))

    assert asyncio.run(play_all()) == [""] * 4


def test_text_actions_are_a_tool(tmp_path):
    solved = reference("maze", (0,))[0]
    with serving(create_mcp_app(load(overrides_of("maze")))) as address:
        assert asyncio.run(play(address + PATH, solved)) == ""


def test_an_episode_over_stdio_has_the_rewards_of_the_environment():
    line = ["-m", "flows.environment", "serve", *overrides_of("shop"), "--as", "mcp", "--stdio"]
    parameters = StdioServerParameters(command=sys.executable, args=line, cwd=CODE, env=dict(os.environ))
    assert asyncio.run(play(stdio_client(parameters), reference("shop", (1,))[0])) == ""


def test_requests_that_an_episode_cannot_accept_are_tool_errors(url):
    async def ask() -> None:
        async with Client(url) as client:

            async def error(tool: str, **arguments) -> str:
                result = await client.call_tool(tool, arguments)
                assert result.is_error
                return text(result)

            assert "step before reset" in await error("find_order", order="A1")
            assert "score before reset" in await error("episode_score")
            assert "no such scenario" in await error("episode_reset", scenario="shop-0")
            assert "seed = -1: expected 0 or more" in await error("episode_reset", seed=-1)
            assert "seed = 'x': expected a whole number" in await error("episode_reset", seed="x")
            assert "no argument 'sed'; expected seed, scenario" in await error("episode_reset", sed=1)
            assert "text is missing" in await error("episode_message")
            with pytest.raises(MCPError, match="Unknown tool: 'jump'"):
                await client.call_tool("jump", {})
            with pytest.raises(MCPError, match="call episode_reset first"):
                await client.get_prompt("task")
            with pytest.raises(MCPError, match="Unknown resource"):
                await client.read_resource("episode://nothing")
            await client.call_tool("episode_reset", {})
            assert not (await client.call_tool("episode_message", {"text": "bye"})).is_error
            assert "after the end" in await error("episode_message", text="bye")

    asyncio.run(ask())


def test_a_malformed_body_is_never_a_server_error(url):
    call = {"name": "find_order", "arguments": {"order": "A"}}
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    reset = {**request, "params": {"name": "episode_reset", "arguments": {"seed": 0, "scenario": "shop-0"}}}
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
    with httpx.Client(headers=headers, timeout=60) as http:
        opened = http.post(url, json={**request, "method": "initialize", "params": hello})
        session = {"mcp-session-id": opened.headers["mcp-session-id"]}
        http.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session)
        bodies = [*malformed_bodies(request), *malformed_bodies(reset)]
        replies = [http.post(url, content=body, headers=session) for body in bodies]
        assert len(bodies) > 200
        assert {reply.status_code for reply in replies} <= {200, 202, 400, 413}
        assert not [reply.text for reply in replies if '"code":-32603' in reply.text.replace(" ", "")]
        too_large = http.post(url, content=iter([b" " * 2**20] * 5), headers=session)
        assert too_large.status_code == 413
        for guess in ("stdio", "1", "0" * 32):
            assert http.post(url, json=request, headers={"mcp-session-id": guess}).status_code == 404
            assert http.delete(url, headers={"mcp-session-id": guess}).status_code == 404


def test_each_session_has_an_episode_of_its_own(url):
    async def ask() -> None:
        async with Client(url) as first, Client(url) as second:
            started = [await client.call_tool("episode_reset", {"seed": n}) for n, client in enumerate((first, second))]
            assert text(started[0]) != text(started[1])
            await first.call_tool("episode_message", {"text": "bye"})
            states = [(await client.read_resource("episode://state")).contents[0].text for client in (first, second)]
            assert ['"done": true' in state for state in states] == [True, False]
            names = {tool.name for tool in (await second.list_tools()).tools}
            assert names > EPISODE
            assert "shop-" in (await second.read_resource("episode://scenarios")).contents[0].text

    asyncio.run(ask())


def test_a_client_that_leaves_frees_its_session():
    async def ask(url: str) -> None:
        for seed in range(3):  # more clients than sessions, one after the other
            async with Client(url, mode="legacy") as client:
                assert not (await client.call_tool("episode_reset", {"seed": seed})).is_error

    with serving(create_mcp_app(load(["environment=guess"]), SessionLimits(sessions=1))) as address:
        asyncio.run(ask(address + PATH))


def test_an_idle_episode_is_closed():
    async def ask(url: str) -> str:
        async with Client(url) as client:
            await client.call_tool("episode_reset", {})
            while True:  # until the check for idle episodes
                await asyncio.sleep(1.0)
                result = await client.call_tool("episode_score", {})
                if result.is_error:
                    return text(result)

    with serving(create_mcp_app(load(["environment=guess"]), SessionLimits(idle=0.5))) as address:
        assert "score before reset" in asyncio.run(ask(address + PATH))


def test_a_protocol_version_without_sessions_is_refused(url):
    async def ask() -> None:
        async with Client(url, mode="2026-07-28") as client:
            await client.list_tools()

    with pytest.raises((MCPError, ExceptionGroup)) as caught:
        asyncio.run(ask())
    errors = caught.value.exceptions if isinstance(caught.value, ExceptionGroup) else [caught.value]
    assert "an episode needs a session" in repr(errors)
