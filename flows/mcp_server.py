"""`python -m flows.mcp_server +experiment=NAME [overrides]`: offer experiments to an agent as tools of an MCP server.

    python -m flows.mcp_server +experiment=quickstart,tic_tac_toe 'serve.overrides=[seed,rounds]'

The agent plans, starts, watches, stops, evaluates and compares runs of the named experiments (`flows.agent_tools`). It
may set the keys that `serve.overrides` lists, and no others. The server speaks the Model Context Protocol on standard
input and output; an MCP client starts it. Runs end with the server, and the same call resumes them.

Everything is validated before the server answers. Exit codes are those of `flows.run`.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from components.errors import Problem, SpecError
from flows.terminal.arguments import refuse_root_option
from flows.terminal.exit_codes import with_exit_codes

if TYPE_CHECKING:
    from flows.agent_tools.course_tool import Mode

INSTRUCTIONS = (
    "Espalier trains language models that act as agents. list_experiments shows what can be trained and which settings "
    "may be changed; plan shows stages, time and cost; run starts a training run and returns its id; status shows its "
    "progress and result; evaluate and compare measure policies on held-out scenarios. Equal work is cached."
)


@with_exit_codes
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until standard input ends. Return exit code 0, or 2 for a user error."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.mcp_server",
        description="Offers experiments to an agent as tools of an MCP server, on standard input and output.",
    )
    parser.add_argument("overrides", nargs="*", help="+experiment=NAME, or several: +experiment=A,B; then overrides")
    parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")
    parser.add_argument(
        "--limit", type=int, default=1, help="maximum number of runs and evaluations at once (default: 1)"
    )
    parser.add_argument(
        "--course",
        choices=["show", "run"],
        help="offer the tool of HelloAgents' course: show the commands of its trainings, or run them",
    )
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    serve(options.overrides, options.config_dir, options.limit, options.course)
    return 0


def serve(overrides: Sequence[str], config_dir: str | None, limit: int, course: Mode | None = None) -> None:
    """Serve the experiments of a command line until standard input ends. course: what the tool of the course may do;
    None: it is not offered. Raises SpecError and ResourceError."""
    with offered(overrides, config_dir, limit, course) as server:
        server.run("stdio")


@contextlib.contextmanager
def offered(overrides: Sequence[str], config_dir: str | None, limit: int, course: Mode | None = None) -> Iterator[Any]:
    """Yield the MCP server of a command line; its runs end with the context. Raises SpecError and ResourceError."""
    from components.environments.optional_packages import import_optional
    from flows.agent_tools.jobs import Jobs
    from flows.agent_tools.permissions import Permissions
    from flows.agent_tools.tools import Tools, reporting_errors
    from flows.scheduling import parameters

    module = import_optional("mcp.server.mcpserver", "mcp", "flows.mcp_server")
    tool_error = import_optional("mcp.server.mcpserver.exceptions", "mcp", "flows.mcp_server").ToolError
    problems = parameters.experiment_problems(parameters.experiment_names(overrides))
    if limit < 1:
        problems.append(Problem("--limit", f"{limit}: expected 1 or more"))
    if problems:
        raise SpecError(problems)
    permitted = Permissions(parameters.requested_experiments(overrides, config_dir))
    jobs = Jobs(limit)
    server = module.MCPServer("espalier", instructions=INSTRUCTIONS, log_level="ERROR")
    tools = Tools(permitted, jobs).all()
    if course is not None:
        from flows.agent_tools.course_tool import CourseTool

        tools.append(CourseTool(permitted, jobs, course, list(overrides)).rl_training)
    for tool in tools:
        server.tool(description=inspect.getdoc(tool))(reporting_errors(tool, tool_error))
    print(f"offers {', '.join(permitted.specs)} on standard input and output", file=sys.stderr, flush=True)
    try:
        yield server
    finally:
        jobs.close()


if __name__ == "__main__":
    from flows.terminal.interrupt import leave

    leave(main)
