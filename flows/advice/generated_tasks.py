"""Tasks that a model writes for the tools of an MCP server: in the run itself (`+experiment=mcp_rl`), or before it
(`flows.environment scenarios`)."""

from __future__ import annotations

from collections.abc import Sequence

from flows.advice.situation import JUDGE

TASKS = "tasks.json"
"""File of the tasks."""
GENERATED = 64
"""Number of tasks."""
SERVER = "environment.command=[python,my_server.py]"
"""Override that names the server, if the user does not."""


MCP_RL = "+experiment=mcp_rl"
"""Override of the experiment that writes the tasks itself."""


def servers(lines: Sequence[str]) -> list[str]:
    """Return the overrides that name the server."""
    return [line for line in lines if line.startswith(("environment.command=", "environment.url="))]


def with_generated_tasks(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command that writes the tasks, and the overrides of the run that reads them."""
    named = servers(lines)
    server = named[-1] if named else SERVER
    key, _, value = server.partition("=")
    author = ["--author", JUDGE.partition("/")[2], "--author-url", "https://api.openai.com/v1"]
    author += ["--key-variable", "OPENAI_API_KEY"]
    words = [word.strip() for word in value.strip("[]").split(",")]
    address = ["--url", value] if key.endswith("url") else ["--", *words]
    writer = ["python", "-m", "flows.environment", "scenarios", "--out", TASKS, "--count", str(GENERATED)]
    return [*writer, *author, *address], [*lines, *([] if named else [server]), f"environment.scenarios={TASKS}"]
