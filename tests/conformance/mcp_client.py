"""`environment=mcp` as the client under test of the MCP conformance suite, which starts this program.

    MCP_CONFORMANCE_SCENARIO=tools_call python -m tests.conformance.mcp_client URL

It plays one episode of the environment as the collector does: reset, the tools, one step for each call, the final
message, close. The calls are those that the scenario of the suite requires.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

from components.environments.adapters.mcp import Mcp
from components.errors import EspalierError, SpecError

CALLS = {
    "tools_call": [{"tool": "add_numbers", "arguments": {"a": 5, "b": 3}}],
    "elicitation-sep1034-client-defaults": [{"tool": "test_client_elicitation_defaults", "arguments": {}}],
    "sse-retry": [{"tool": "test_reconnection", "arguments": {}}],
}
"""Calls by scenario; those that are not named call the tool of the suite's servers that require authorization."""
AUTHORIZED = [{"tool": "test-tool", "arguments": {}}]
WITHOUT_TOOLS = "initialize"
"""Scenario whose server lists no tools, so that there is nothing to offer to an agent."""
TIMEOUT = 15.0


async def play(url: str, calls: list[dict[str, object]]) -> list[str]:
    """Play one episode with the server; return the results of the calls. Raises EspalierError."""
    task = {"task": "Call the tools.", "split": "train", "solution": [*calls, {"say": "done"}]}
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder) / "tasks.json"
        tasks.write_text(json.dumps([task]))
        environment = Mcp(str(tasks), url=url, timeout=TIMEOUT, start_timeout=TIMEOUT)
    results = []
    try:
        scenario = environment.scenarios("train")[0]
        await environment.reset(scenario)
        await environment.tools()
        for action in environment.solve(scenario):
            step = await environment.step(action)
            results += [message["content"] for message in step.observation]
    finally:
        await environment.close()
    return results


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: MCP_CONFORMANCE_SCENARIO=NAME python -m tests.conformance.mcp_client URL", file=sys.stderr)
        return 2
    scenario = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
    try:
        results = asyncio.run(play(sys.argv[1], CALLS.get(scenario, AUTHORIZED)))
    except SpecError as error:
        print(error, file=sys.stderr)
        return 0 if scenario == WITHOUT_TOOLS else 1
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(results))
    return 1 if any(result.startswith("error:") for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
