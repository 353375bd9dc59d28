"""Plays episodes with OpenEnv's own clients; run by the interpreter that has the package.

    python openenv_client.py URL < episodes.json

An episode is {"client": "generic" or "mcp", "reset": {...}, "actions": [...]}. The output is a JSON list with, for each
episode, the first observation, the tools (mcp), and each step's observation, reward and done; or the error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient


async def play(url: str, episode: dict[str, Any]) -> dict[str, Any]:
    kind = MCPToolClient if episode["client"] == "mcp" else GenericEnvClient
    steps: list[dict[str, Any]] = []
    report: dict[str, Any] = {"steps": steps}
    try:
        async with kind(base_url=url) as client:
            if episode["reset"] is not None:
                result = await client.reset(**episode["reset"])
                report["first"], report["metadata"] = plain(result.observation), result.metadata
            if episode["client"] == "mcp":
                report["tools"] = [tool.name for tool in await client.list_tools()]
            for action in episode["actions"]:
                result = await client.step(action)
                step = {"observation": plain(result.observation), "reward": result.reward, "done": result.done}
                steps.append(step)
            state = await client.state()
            report["state"] = state if isinstance(state, dict) else state.model_dump()
    except RuntimeError as error:
        report["error"] = str(error)
    return report


def plain(observation: Any) -> Any:
    return observation if isinstance(observation, dict) else observation.model_dump()


async def main() -> None:
    episodes = json.load(sys.stdin)
    print(json.dumps(await asyncio.gather(*(play(sys.argv[1], episode) for episode in episodes))))


if __name__ == "__main__":
    asyncio.run(main())
