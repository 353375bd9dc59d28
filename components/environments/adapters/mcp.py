"""MCP servers as environments: the server provides the agent's tools, a file provides the tasks.

A server is started by a command or reached at a URL (streamable HTTP). Each episode has its own session, so episodes
are isolated as far as the server keeps its state per session. Tool calls are validated against the schema of the tool
before the server receives them. An episode ends with a message without tool calls. A user function or a judge model
decides its success; without either, the reward of the experiment scores the episode.

Model output never reaches the command, the URL or the environment variables; those are configuration.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from components.environments.adapters.mcp_judge import Judge, McpEpisode, ToolCallResult
from components.environments.adapters.mcp_session import EXTRA, Address, McpSession, ToolResult
from components.environments.adapters.mcp_tools import Tool, chosen, valid_name
from components.environments.language_model import ServedModel
from components.environments.optional_packages import import_optional
from components.environments.protocol import Messages, Step
from components.environments.seeded import Count
from components.environments.tool_tasks import content_digest, read_tasks
from components.environments.tools import call
from components.errors import EnvironmentFailed, SpecError
from components.specs.marks import ENV_VARIABLE, FILES, PROGRAM, SERVER
from components.specs.registered import registered
from components.specs.served import VARIABLE, check_address
from components.specs.source import module_digest, script_digest
from components.trajectories.schema import Scenario

SYSTEM = "You have tools. Use them as needed to do what you are asked for, then say the result."
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""Name of a Python module, as after `-m`."""
MOST_FILE = 2**26
"""Maximum size of a file in the command whose content enters stage keys, in bytes."""

Variable = Annotated[str, Field(pattern=VARIABLE)]


@registered("environment.mcp")
class Mcp:
    """An MCP server as an environment.

    Scenario types and difficulties: those of the file.

    Args:
        scenarios: JSON file of tasks (docs/reference/environments/packages.md), as `flows.environment scenarios`
            writes it. null: the tasks come from a flow that writes them, `flow=mcp_rl`.
        command: Program of a stdio server and its arguments.
        url: URL of a server over streamable HTTP.
        variables: Names of environment variables passed to the program, besides PATH, HOME and the like.
        headers: Headers of requests to the URL; each value is the name of an environment variable.
        folder: Working directory of the program.
        tools: Names of the tools that are offered, as on the server; null offers all.
        system: System prompt.
        success: Function `(mcp.Episode)` that returns a bool or a mapping with `success`, synchronous or async.
        judge: Model that decides the success: `{url, model, key_variable, timeout}`. Without `success` and `judge`, the
            reward of the experiment scores the episode.
        sessions: `episode`, one session per episode; `shared`, one session per instance, for stateless servers.
        train, heldout: Maximum number of scenarios of the split; null takes all.
        timeout: Timeout of a call, in seconds.
        start_timeout: Timeout for the start of the server, in seconds.
    """

    def __init__(
        self,
        scenarios: Annotated[str | None, FILES],
        command: Annotated[Sequence[str] | None, PROGRAM] = None,
        url: Annotated[str | None, SERVER] = None,
        variables: Annotated[Sequence[Variable], ENV_VARIABLE] = (),
        headers: Annotated[Mapping[str, Variable] | None, ENV_VARIABLE] = None,
        folder: Annotated[str | None, FILES] = None,
        tools: Sequence[str] | None = None,
        system: str = SYSTEM,
        success: Callable[..., Any] | None = None,
        judge: Judge | None = None,
        sessions: Annotated[str, Field(pattern="^(episode|shared)$")] = "episode",
        train: Count | None = None,
        heldout: Count | None = None,
        timeout: Annotated[float, Field(gt=0)] = 60.0,
        start_timeout: Annotated[float, Field(gt=0)] = 60.0,
    ):
        import_optional("mcp", EXTRA)
        if (command is None) == (url is None):
            raise SpecError.at("environment.command", "set command (a program) or url, exactly one of the two")
        if command is not None and not command:
            raise SpecError.at("environment.command", "is empty; expected a program and its arguments")
        if url is not None:
            try:
                check_address(url, "http://127.0.0.1:8000/mcp", "environment.headers")
            except ValueError as error:
                raise SpecError.at("environment.url", f"expected {error}") from None
        if url is not None and variables:
            raise SpecError.at("environment.variables", "apply to a program (command); for a url, set headers")
        if command is not None and headers:
            raise SpecError.at("environment.headers", "apply to requests to url; for a program, set variables")
        if success is not None and judge is not None:
            raise SpecError.at("environment.judge", "is set together with success; set only one of the two")
        self.address = Address(tuple(command or ()), url or "", tuple(variables), dict(headers or {}), folder)
        self.system, self.success = system, success
        self.judge = Judge(**judge) if isinstance(judge, dict) else judge
        self.offered = None if tools is None else list(tools)
        self.shared = sessions == "shared"
        self.timeout, self.start_timeout = timeout, start_timeout
        self._scenarios = () if scenarios is None else read_tasks(scenarios)
        self.most = {"train": train, "heldout": heldout}
        self._session: McpSession | None = None
        self._used = False
        self._tools: dict[str, Tool] = {}

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that determine results: tasks by content, the server by the user's own code, the judge
        by its model; without timeouts."""
        excluded = ("timeout", "start_timeout", "folder")
        relevant = {name: value for name, value in arguments.items() if name not in excluded}
        judge = arguments.get("judge")
        command = list(arguments.get("command") or [])
        return relevant | {
            "scenarios": arguments["scenarios"] and content_digest(arguments["scenarios"]),
            "command": command_key(command, Path(arguments.get("folder") or ".")),
            "judge": {"model": judge.model} if isinstance(judge, ServedModel) else judge,
        }

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return [scenario for scenario in self._scenarios if scenario.split == split][: self.most.get(split)]

    async def tools(self) -> list[dict[str, Any]]:
        """Return the offered tools. Raises SpecError if a tool cannot be offered."""
        await self._ensure_session()
        return [tool.schema for tool in self._tools.values()]

    async def reset(self, scenario: Scenario) -> Messages:
        await self._ensure_session()
        self.scenario = scenario
        self.calls: list[ToolCallResult] = []
        self.invalid = self.failed = 0
        self.over = False
        first = {"role": "user", "content": scenario.input["task"]}
        return [{"role": "system", "content": self.system}, first] if self.system else [first]

    async def step(self, action: dict[str, Any]) -> Step:
        calls = action.get("tool_calls") or []
        if not calls or self.over:
            observation = [_tool_message(tool_call, "error: the episode is over") for tool_call in calls]
            outcome = {} if self.over else await self._judge(action.get("content") or "")
            self.over = True
            return Step(observation, done=True, info=self._outcome(outcome))
        observation = [_tool_message(tool_call, await self._call(tool_call["function"])) for tool_call in calls]
        return Step(observation, info=self._outcome({}))

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the solution from the file. Raises SpecError if it has none."""
        steps = scenario.input.get("solution")
        if steps is None:
            message = f"has no solution of {scenario.id}; add `solution` to its tasks, or set warmup=none"
            raise SpecError.at("environment.scenarios", message)
        return [
            call(valid_name(step["tool"]), step["arguments"], number)
            if "tool" in step
            else {"role": "assistant", "content": step["say"]}
            for number, step in enumerate(steps)
        ]

    async def _ensure_session(self) -> None:
        """Open a session that no episode has used, unless sessions are shared; list its tools."""
        if self._session is not None and (self._used and not self.shared):
            await self.close()
        if self._session is None:
            session = McpSession(self.address, self.timeout)
            await session.open(self.start_timeout)
            self._session, self._used = session, False
            self._tools = chosen(await session.tools(), self.offered)

    async def _call(self, function: Mapping[str, Any]) -> str:
        """Execute one call; return its result or an error message."""
        tool = self._tools.get(function["name"])
        if tool is None:
            self.invalid += 1
            return f"error: no tool {str(function['name'])[:80]}; there are {', '.join(self._tools) or 'none'}"
        arguments, problem = tool.parse(function["arguments"])
        if problem:
            self.invalid += 1
            return f"error: {problem}"
        result = await self._ask(tool.name, arguments)
        self.calls.append(ToolCallResult(tool.name, arguments, result.text, result.failed))
        self.failed += result.failed
        return f"error: {result.text}" if result.failed else result.text

    async def _ask(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        if self._session is None:
            raise EnvironmentFailed("step before reset")
        self._used = True
        return await self._session.call(name, arguments)

    async def _judge(self, answer: str) -> dict[str, Any]:
        async def call_tool(name: str, arguments: dict[str, Any]) -> str:
            return (await self._ask(name, arguments)).text

        episode = McpEpisode(self.scenario, answer, list(self.calls), call_tool)
        if self.judge is not None:
            success, why = await self.judge.judge(episode)
            return {"success": success, "why": why}
        if self.success is None:
            return {}
        result = self.success(episode)
        result = await result if inspect.isawaitable(result) else result
        return dict(result) if isinstance(result, Mapping) else {"success": bool(result)}

    def _outcome(self, verdict: dict[str, Any]) -> dict[str, Any]:
        return {
            **({"success": False} if self.success or self.judge else {}),
            **verdict,
            "invalid_actions": self.invalid,
            "tool_errors": self.failed,
            "calls": len(self.calls),
        }


def _tool_message(tool_call: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": tool_call["id"], "content": text}


def command_key(command: Sequence[str], folder: Path) -> list[Any]:
    """Return the command for stage keys.

    Files are represented by name and content; a Python script or module of the user includes its local imports.
    Installed programs and all other arguments are unchanged.
    """
    parts: list[Any] = []
    for index, argument in enumerate(command):
        digest = None
        path = folder / Path(argument).expanduser()
        if index and command[index - 1] == "-m":
            digest = module_digest(folder, argument) if MODULE.fullmatch(argument) else None
        elif index or (os.sep in argument and not _installed(path, folder)):
            digest = _file_digest(path)
        name = path.name if digest or not index else argument
        parts.append([name, digest] if digest else name)
    return parts


def _file_digest(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > MOST_FILE:
            return None
        return script_digest(path) if path.suffix == ".py" else hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None


def _installed(program: Path, folder: Path) -> bool:
    """Return True if a program is in a `bin` folder of a virtual environment or outside the working directory."""
    inside = program.absolute().is_relative_to(folder.absolute())
    return program.parent.name == "bin" and (not inside or (program.parent.parent / "pyvenv.cfg").exists())
