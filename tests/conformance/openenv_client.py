"""Plays episodes with OpenEnv's own clients; run by the interpreter that has the package.

    python openenv_client.py < request.json

The request is {"validate": [URL, ...], "episodes": [...]}. An episode is {"url": URL, "client": "generic" or "mcp",
"reset": {...} or null, "actions": [...]}. The output is a JSON object with the validation report of each URL, and, for
each episode, the first observation, the tools (mcp), observation, reward and done of each step, the state, and the
error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.cli._validation import validate_running_environment
from openenv.core import CallToolAction
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient
from pydantic import BaseModel


class Message(BaseModel):
    """Action that is a message; the MCP client takes only objects."""

    message: str


async def play(episode: dict[str, Any]) -> dict[str, Any]:
    kind = MCPToolClient if episode["client"] == "mcp" else GenericEnvClient
    steps: list[dict[str, Any]] = []
    report: dict[str, Any] = {"steps": steps, "error": ""}
    try:
        async with kind(base_url=episode["url"]) as client:
            if episode["reset"] is not None:
                result = await client.reset(**episode["reset"])
                report["first"], report["metadata"] = plain(result.observation), result.metadata
            if episode["client"] == "mcp":
                report["tools"] = [tool.name for tool in await client.list_tools()]
            for action in episode["actions"]:
                result = await client.step(action if kind is GenericEnvClient else as_object(action))
                step = {"observation": plain(result.observation), "reward": result.reward, "done": result.done}
                steps.append(step)
            report["state"] = plain(await client.state())
    except RuntimeError as error:
        report["error"] = str(error)
    return report


def as_object(action: dict[str, Any]) -> Any:
    return Message(**action) if "message" in action else CallToolAction(**action)


def plain(value: Any) -> Any:
    return value if isinstance(value, dict) else value.model_dump()


async def main() -> None:
    request = json.load(sys.stdin)
    reports = [validate_running_environment(url, timeout_s=60.0) for url in request["validate"]]
    print(json.dumps({"validation": reports, "episodes": [await play(episode) for episode in request["episodes"]]}))


if __name__ == "__main__":
    asyncio.run(main())
