"""`python -m flows.environment SUBCOMMAND`: serve an environment to other programs, or write tasks for one."""

from __future__ import annotations

from flows.terminal.interrupt import leave
from flows.terminal.subcommands import Subcommand, Subcommands

ENVIRONMENT = Subcommands(
    "environment",
    {
        "serve": Subcommand("flows.environment.serving:main", "serve an environment to other programs"),
        "scenarios": Subcommand(
            "flows.environment.scenarios:main", "write tasks for the tools of an MCP server with a language model"
        ),
    },
)

if __name__ == "__main__":
    leave(ENVIRONMENT.main)
