"""Client for OpenEnv environment servers.

An OpenEnv server runs separately. Each instance of this class holds one WebSocket connection, which is one environment
on the server. The server defines actions by a JSON schema, which becomes the agent's only tool, `act`. If an action is
a single text, a plain message is accepted too. If the actions of a server are tool calls (MCP), the agent gets these
tools, and a plain message is accepted if an action may be one.

The OpenEnv package is not required: the protocol is a few JSON messages. A server error raises EnvironmentFailed, or
EnvironmentUnavailable if the server is full, overloaded or unreachable. Invalid actions are reported to the agent and
counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

import httpx
from pydantic import Field

from components.bounded_reply import InvalidReply, LateReply, ReplyLimits, parse, request, typed
from components.environments.adapters.openenv_messages import (
    ErrorData,
    Listed,
    Observed,
    Schemas,
    ServerError,
    act_tool,
    bounded_schema,
    render_fields,
    tool_result,
)
from components.environments.optional_packages import import_optional
from components.environments.protocol import Messages, Step
from components.environments.seeded import Count, scenario_numbers
from components.errors import EnvironmentFailed, EnvironmentUnavailable, SpecError
from components.exceptions import PASSING, passes
from components.json_text import reject_constant
from components.retry import Backoff
from components.specs.marks import REFERENCE, SERVER
from components.specs.registered import registered
from components.specs.served import check_address
from components.trajectories.schema import Scenario

EXTRA = "openenv"
SYSTEM = "You act in an environment. Each turn, take one action and look at what it tells you."
TOO_LARGE = 1009
"""Code with which a WebSocket client closes a connection whose message is too large."""
VALUES_PER_MB = 50_000
"""JSON values that a reply may have for each MB of `max_reply`."""
NO_RESULT = ("url", "timeout", "patience", "max_reply")
"""Arguments that determine no result."""
HIDDEN = ("metadata", "type")
"""Fields of an action that are not shown to the agent."""
TOOL_FIELDS = {"tool_name", "arguments"}
"""Fields of an action that is a tool call."""
TEXT_FIELD = "message"
"""Field of an action that is a message, on a server whose other actions are tool calls."""


@registered("environment.openenv")
class OpenEnv:
    """An environment on an OpenEnv server.

    Scenario type: the name. Difficulty: unknown.

    Args:
        name: Name of the environment; it represents the server in stage keys.
        url: URL of the server, such as http://127.0.0.1:8000.
        reset: Arguments of every reset, besides the seed.
        system: System prompt.
        render: Function `(observation) -> str` that renders an observation; null lists its fields.
        success: Minimum return of a successful episode.
        seed: Seed of the scenarios, which are reset seeds of the server.
        train, heldout: Number of scenarios of the split.
        max_steps: Maximum number of steps of an episode.
        step_errors: Effect of a server error at an action: `fail`, the episode fails; `tell`, it is an invalid action
            and the agent sees the error.
        timeout: Timeout of a response, in seconds.
        patience: Maximum duration of retries in seconds while the server is unreachable or full.
        max_reply: Maximum size of a reply in MB; observations with images need more than the default.
    """

    def __init__(
        self,
        name: str,
        url: Annotated[str, SERVER],
        reset: Annotated[Mapping[str, Any] | None, REFERENCE] = None,
        system: str = SYSTEM,
        render: Callable[[dict[str, Any]], str] | None = None,
        success: Annotated[float, Field(gt=0)] = 1.0,
        seed: Annotated[int, Field(ge=0)] = 0,
        train: Count = 256,
        heldout: Count = 64,
        max_steps: Annotated[int, Field(ge=1)] = 40,
        step_errors: Literal["fail", "tell"] = "fail",
        timeout: Annotated[float, Field(gt=0)] = 60.0,
        patience: Annotated[float, Field(ge=0)] = 30.0,
        max_reply: Annotated[int, Field(ge=1, le=1024)] = 4,
    ):
        import_optional("websockets", EXTRA)
        try:
            check_address(url, "http://127.0.0.1:8000")
        except ValueError as error:
            raise SpecError.at("environment.url", f"expected {error}") from None
        self.name, self.url, self.system = name, url.rstrip("/"), system
        self.reset_arguments, self.render, self.success = dict(reset or {}), render or render_fields, success
        self.seed, self.counts = seed, {"heldout": heldout, "train": train}
        self.max_steps, self.step_errors = max_steps, step_errors
        self.timeout, self.patience = timeout, patience
        self._limits = ReplyLimits(max_reply << 20, max_reply * VALUES_PER_MB)
        self._socket: Any = None
        self._tools: list[dict[str, Any]] | None = None
        self._uses_tools = False
        """True if the actions of the server are tool calls."""
        self._text = ""
        """Name of the field of an action that takes a plain message; empty if there is none."""

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that determine results: not the address, timeouts and size limit."""
        return {name: value for name, value in arguments.items() if name not in NO_RESULT}

    def scenarios(self, split: str) -> Sequence[Scenario]:
        seeds = [(self.seed * 1_000_003 + number) % 2**31 for number in scenario_numbers(self.counts, split)]
        return [Scenario(f"{self.name}-{seed}", {"seed": seed}, split, self.name) for seed in seeds]

    async def tools(self) -> list[dict[str, Any]]:
        if self._tools is None:
            action = await self._schema()
            fields = {name: field for name, field in action["properties"].items() if name not in HIDDEN}
            self._uses_tools = not fields or set(fields) >= TOOL_FIELDS
            self._tools = await self._list_tools() if self._uses_tools else [act_tool(action, fields)]
            if self._uses_tools:
                self._text = TEXT_FIELD if TEXT_FIELD in fields else ""
            elif len(fields) == 1:
                ((name, schema),) = fields.items()
                self._text = name if schema.get("type") == "string" else ""
        return self._tools

    async def reset(self, scenario: Scenario) -> Messages:
        await self.tools()
        self.total, self.steps, self.invalid, self.over = 0.0, 0, 0, False
        await self._connect()
        result = await self._ask({"type": "reset", "data": {**self.reset_arguments, "seed": scenario.input["seed"]}})
        self._update(result)
        first = {"role": "user", "content": self._render(result) or "(begin)"}
        return [{"role": "system", "content": self.system}, first] if self.system else [first]

    async def step(self, action: dict[str, Any]) -> Step:
        before = self.total
        calls = action.get("tool_calls") or []
        observation: Messages = []
        for tool_call in calls:
            result = await self._call_tool(tool_call["function"])
            observation.append({"role": "tool", "tool_call_id": tool_call["id"], "content": result})
        if not calls:
            observation = [{"role": "user", "content": await self._act_text(action.get("content") or "")}]
        return Step(observation, self.total - before, self.over, self.outcome())

    def outcome(self) -> dict[str, Any]:
        """Return the outcome of the episode as if it ended now."""
        return {
            "success": self.total >= self.success,
            "progress": min(1.0, max(0.0, self.total / self.success)),
            "return": self.total,
            "steps": self.steps,
            "invalid_actions": self.invalid,
        }

    async def close(self) -> None:
        if self._socket is not None:
            socket, self._socket = self._socket, None
            await socket.close()

    # Actions

    async def _call_tool(self, function: Mapping[str, Any]) -> str:
        names = [tool["function"]["name"] for tool in self._tools or ()]
        if function["name"] not in names:
            return self._reject(f"no tool {str(function['name'])[:80]}; there are {', '.join(names)}")
        text = function["arguments"]
        try:
            arguments = json.loads(text if isinstance(text, str) else json.dumps(text), parse_constant=reject_constant)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return self._reject(f"the arguments of {function['name']} are no JSON object")
        if self._uses_tools:
            arguments = {"type": "call_tool", "tool_name": function["name"], "arguments": arguments}
        else:
            arguments = {name: value for name, value in arguments.items() if name != "metadata"}
        return await self._act(arguments)

    async def _act_text(self, text: str) -> str:
        if not self._text:
            names = ", ".join(tool["function"]["name"] for tool in self._tools or ())
            return self._reject(f"act by a tool: {names}")
        return await self._act({self._text: text})

    async def _act(self, action: dict[str, Any]) -> str:
        if self.over:
            return self._reject("the episode is over")
        self.steps += 1
        self.over = self.steps >= self.max_steps
        try:
            request = {"type": "step", "data": json.loads(json.dumps(action).encode("utf-8", "replace"))}
            result = await self._ask(request)
        except ServerError as error:
            if error.invalid or self.step_errors == "tell":
                return self._reject(str(error))
            raise EnvironmentFailed(f"the OpenEnv server {self.url} failed at an action: {error}") from None
        self._update(result)
        return self._render(result) or "(nothing to see)"

    def _reject(self, reason: str) -> str:
        """Count an invalid action; return the message for the agent."""
        self.invalid += 1
        return f"error: {reason}"

    def _update(self, result: Mapping[str, Any]) -> None:
        """Update the return and the end of the episode."""
        self.total += result["reward"] or 0.0
        self.over = self.over or bool(result["done"])

    def _render(self, result: Mapping[str, Any]) -> str:
        observation = dict(result["observation"] or {})
        return tool_result(observation) if self._uses_tools and "result" in observation else self.render(observation)

    # The server

    async def _schema(self) -> dict[str, Any]:
        """Return the JSON schema of an action; retry while the server is unreachable."""
        backoff = Backoff(self.patience)
        while True:
            try:
                async with httpx.AsyncClient() as client:
                    url = f"{self.url}/schema"
                    reply = await request(client, "GET", url, seconds=self.timeout, limits=self._limits)
                if reply.status == 200:
                    return bounded_schema(typed(Schemas, parse(reply.content, self._limits)).action)
                problem, unavailable = f"{self.url}/schema: HTTP {reply.status}", reply.status in PASSING
                again = unavailable
            except httpx.TransportError as error:
                problem, unavailable = f"{self.url} cannot be reached: {type(error).__name__}: {error}", passes(error)
                again = True
            except LateReply as error:
                problem, unavailable, again = f"{self.url}/schema: the server {error}", False, True
            except InvalidReply as error:
                raise EnvironmentFailed(
                    f"{self.url}/schema: the server {error}; check that it is an OpenEnv server"
                ) from None
            pause = backoff.pause() if again else None
            if pause is None:
                raise (EnvironmentUnavailable if unavailable else EnvironmentFailed)(f"the OpenEnv server {problem}")
            await asyncio.sleep(pause)

    async def _list_tools(self) -> list[dict[str, Any]]:
        """Return the tools of a server whose actions are tool calls."""
        await self._connect()
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = await self._exchange({"type": "mcp", "data": request})
        try:
            tools = typed(Listed, answer).data.result.tools
            parameters = [bounded_schema(tool.schema_ or {"type": "object"}) for tool in tools]
        except InvalidReply as error:
            raise EnvironmentFailed(f"the OpenEnv server {self.url} listed no tools: it {error}") from None
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description or "", "parameters": schema},
            }
            for tool, schema in zip(tools, parameters, strict=True)
        ]

    async def _connect(self) -> None:
        """Open a connection; retry while the server is full or unreachable. Raises EnvironmentUnavailable in the
        end."""
        if self._socket is not None:
            return
        client = import_optional("websockets.asyncio.client", EXTRA)
        errors = import_optional("websockets.exceptions", EXTRA)
        parts = urlsplit(f"{self.url}/ws")
        address = urlunsplit(parts._replace(scheme="wss" if parts.scheme == "https" else "ws"))
        backoff = Backoff(self.patience)
        while True:
            try:
                self._socket = await client.connect(
                    address, max_size=self._limits.size, open_timeout=self.timeout, compression=None
                )
                await self._exchange({"type": "state"})  # a full server rejects the first message
                return
            except (OSError, TimeoutError, errors.WebSocketException) as error:
                reason = f"{type(error).__name__}: {error}"
                unavailable = passes(error) or isinstance(error, TimeoutError | errors.InvalidMessage)
            except ServerError as error:
                if not error.full:
                    return
                unavailable = True
                reason = f"{error}; lower collect.concurrency and evaluate.concurrency"
            await self.close()
            pause = backoff.pause()
            if pause is None:
                kind = EnvironmentUnavailable if unavailable else EnvironmentFailed
                raise kind(f"the OpenEnv server {self.url} accepts no connection: {reason}")
            await asyncio.sleep(pause)

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a reset or a step; return the result with its observation, reward and end."""
        if self._socket is None:
            raise EnvironmentFailed("step before reset")
        try:
            answer = await self._exchange(message)
        except ServerError as error:
            if message["type"] == "step":
                raise
            raise EnvironmentFailed(f"the OpenEnv server {self.url} failed at {message['type']}: {error}") from None
        try:
            return typed(Observed, answer).data.model_dump()
        except InvalidReply as error:
            raise EnvironmentFailed(f"the OpenEnv server {self.url} {error}; expected an observation") from None

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return its response.

        Raises ServerError if the server reports an error, EnvironmentFailed if there is no valid response, and
        EnvironmentUnavailable if the connection is lost.
        """
        errors = import_optional("websockets.exceptions", EXTRA)
        try:
            async with asyncio.timeout(self.timeout):
                with contextlib.suppress(errors.ConnectionClosed):  # the server may have sent a reason before it closed
                    await self._socket.send(json.dumps(message))
                answer = typed(dict[str, Any], parse(await self._socket.recv(), self._limits))
            error = typed(ErrorData, answer.get("data") or {}) if answer.get("type") == "error" else None
        except TimeoutError:
            text = f"timed out at {message['type']} after {self.timeout:g} s (environment.timeout)"
            raise EnvironmentFailed(f"the OpenEnv server {self.url} {text}") from None
        except errors.ConnectionClosed as closed:
            if closed.sent is not None and closed.sent.code == TOO_LARGE:
                text = f"a message of more than {self._limits.size >> 20} MB (environment.max_reply)"
                raise EnvironmentFailed(f"the OpenEnv server {self.url} returned {text}") from None
            raise EnvironmentUnavailable(f"the OpenEnv server {self.url} closed the connection: {closed}") from None
        except InvalidReply as invalid:
            raise EnvironmentFailed(f"the OpenEnv server {self.url} {invalid}") from None
        if error is not None:
            raise ServerError(error)
        return answer
