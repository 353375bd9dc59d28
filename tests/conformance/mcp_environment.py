"""Conformance of served environments with MCP: episodes of the official Python client.

    python -m tests.conformance.mcp_environment [--environment NAME ...] [--json]

Each built-in environment is served over streamable HTTP, and the client plays a solved and a wrong episode, each in a
session of its own and both at once; tools, observations and rewards must be those of the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

from tests.conformance.reference_episodes import BUILT_IN, ReferenceEpisode, difference, overrides_of, reference
from tests.conformance.report import Case, Report, show

SUITE = "MCP, environments served"
COMMAND = "python -m tests.conformance.mcp_environment"
EPISODE = {"episode_reset", "episode_message", "episode_score"}
OVER = "(the episode is over)"


async def play(target: Any, episode: ReferenceEpisode) -> str:
    """Return the difference between an episode of the client and the expected one; empty if they are equal. target: URL
    or transport of a server."""
    from mcp import Client

    async with Client(target) as client:
        start = await client.call_tool("episode_reset", {"seed": episode.seed})
        if start.is_error:
            return str(start.content[0].text)
        tools = {tool.name for tool in (await client.list_tools()).tools} - EPISODE
        if tools != set(episode.tools):
            return f"tools are {sorted(tools)}, expected {sorted(episode.tools)}"
        prompt = await client.get_prompt("task")
        if [message.content.text for message in prompt.messages] != [message["content"] for message in episode.first]:
            return "the prompt is not the task"
        observations, total, done = [], 0.0, False
        for action in episode.actions:
            results = [await client.call_tool(name, arguments) for name, arguments in calls_of(action)]
            observations.append("\n\n".join(text for result in results if (text := shown(result))))
            total += sum(result.structured_content["reward"] for result in results)
            done = results[-1].structured_content["done"]
        score = (await client.call_tool("episode_score", {})).structured_content["score"]
        if done and score != total:
            return f"episode_score is {score:g}, the rewards sum to {total:g}"
        return difference(episode, start.content[0].text, observations, total, done)


def calls_of(action: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return an action as MCP calls."""
    functions = [call["function"] for call in action.get("tool_calls") or ()]
    if not functions:
        return [("episode_message", {"text": action["content"]})]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def shown(result: Any) -> str:
    """Return the environment's text of a result."""
    return str(result.content[0].text).removesuffix(OVER).rstrip("\n") if result.content else ""


def run(names: Sequence[str]) -> list[Case]:
    """Return the cases of the environments."""
    from flows.interop.listening import serving
    from flows.interop.mcp import PATH, create_mcp_app
    from flows.interop.source import load

    cases = []
    for name in names:
        episodes = reference(name)
        with serving(create_mcp_app(load(overrides_of(name)))) as url:
            problems = asyncio.run(_play_all(url + PATH, episodes))
        cases += [
            Case(episode.name, "failed" if problem else "passed", problem)
            for episode, problem in zip(episodes, problems, strict=True)
        ]
    return cases


async def _play_all(url: str, episodes: Sequence[ReferenceEpisode]) -> list[str]:
    return await asyncio.gather(*(play(url, episode) for episode in episodes))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.mcp_environment", description=__doc__)
    parser.add_argument("--environment", action="append", choices=BUILT_IN, help="environment to check (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("mcp") is None:
        return show(Report(SUITE, "", COMMAND, reason="mcp is not installed"), options.json)
    report = Report(SUITE, importlib.metadata.version("mcp"), COMMAND, run(options.environment or BUILT_IN))
    return show(report, options.json)


if __name__ == "__main__":
    sys.exit(main())
