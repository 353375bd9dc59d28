"""OpenEnv: a client for its environment servers.

A server of OpenEnv runs beside; each instance of this class holds one connection to it (a WebSocket), which is one
environment there. What an action is, the server says as a JSON schema: it becomes the agent's one tool, `act`. Where an
action is one text and nothing else, what the agent says will do. A server whose actions are calls of tools (MCP) has
these for tools.

The package itself is not needed here: the protocol is a few JSON messages. What a server does wrong ends the episode as
EnvironmentFailed, and as EnvironmentAway where it is full, overloaded or gone; what it says is wrong with an action is
told to the agent and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

import httpx
from pydantic import Field

from components.environments.optional_packages import import_optional
from components.environments.protocol import Messages, Step
from components.environments.scenario_counts import Count
from components.environments.tools import ACT
from components.errors import EnvironmentAway, EnvironmentFailed, Problem, SpecError
from components.exceptions import PASSING, passes
from components.specs.registered import registered
from components.specs.served import check_address
from components.trajectories.schema import Scenario

EXTRA = "openenv"
SYSTEM = "You act in an environment. Each turn, take one action and look at what it tells you."
MAX_MESSAGE = 2**26
"""Bytes of one message of a server."""
FULL = "CAPACITY_REACHED"
WRONG = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of a server that has no room, and of one that was sent what is no action."""
PAUSE = 0.25
"""Seconds before a connection is tried again, then twice as many up to 4."""
HIDDEN = ("metadata", "type")
"""Fields of an action that no agent fills."""
TOOL_FIELDS = {"tool_name", "arguments"}


@registered("environment.openenv")
class OpenEnv:
    """name: of the environment; it stands for the server in stage keys. url: of the server, such as
    http://127.0.0.1:8000. reset: arguments of every reset besides the seed. system: what the agent is told first.
    render: a function `(observation) -> str`; null: its fields, written out. success: the sum of an episode's rewards
    from which it is one. seed: of the scenarios, which are seeds of the server's resets. train, heldout: scenarios of
    the two splits. max_steps: after which an episode ends. step_errors: what it is if the server fails at an action: a
    failed episode (`fail`), or an invalid action that the agent is told of (`tell`). timeout: seconds for one answer.
    patience: seconds for which a server that is not there yet, or has no room, is tried again.

    Scenario type: the name. Difficulty: not known.
    """

    def __init__(
        self,
        name: str,
        url: str,
        reset: Mapping[str, Any] | None = None,
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
    ):
        import_optional("websockets", EXTRA)
        try:
            check_address(url, "http://127.0.0.1:8000")
        except ValueError as error:
            raise SpecError([Problem("environment.url", f"expected {error}")]) from None
        self.name, self.url, self.system = name, url.rstrip("/"), system
        self.given, self.render, self.success = dict(reset or {}), render or written_out, success
        self.seed, self.counts = seed, {"heldout": heldout, "train": train}
        self.max_steps, self.step_errors = max_steps, step_errors
        self.timeout, self.patience = timeout, patience
        self._socket: Any = None
        self._tools: list[dict[str, Any]] | None = None
        self._called = False
        """Whether the server's actions are calls of tools."""
        self._text = ""
        """The field of an action that is one text."""

    @staticmethod
    def key_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
        """Where the server is, and how patient we are, changes no episode."""
        return {name: value for name, value in given.items() if name not in ("url", "timeout", "patience")}

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """Heldout seeds come first: a larger train split then leaves them as they are."""
        first = {"heldout": 0, "train": self.counts["heldout"]}.get(split, 0)
        seeds = [(self.seed * 1_000_003 + first + number) % 2**31 for number in range(self.counts.get(split, 0))]
        return [Scenario(f"{self.name}-{seed}", {"seed": seed}, split, self.name) for seed in seeds]

    async def tools(self) -> list[dict[str, Any]]:
        if self._tools is None:
            action = await self._schema()
            fields = {name: one for name, one in (action.get("properties") or {}).items() if name not in HIDDEN}
            self._called = not fields or set(fields) == TOOL_FIELDS
            self._tools = await self._listed() if self._called else [_act(action, fields)]
            if not self._called and len(fields) == 1:
                ((name, schema),) = fields.items()
                self._text = name if schema.get("type") == "string" else ""
        return self._tools

    async def reset(self, scenario: Scenario) -> Messages:
        await self.tools()
        self.total, self.steps, self.invalid, self.over = 0.0, 0, 0, False
        await self._connected()
        seen = await self._ask({"type": "reset", "data": {**self.given, "seed": scenario.input["seed"]}})
        self._take(seen)
        first = {"role": "user", "content": self._shown(seen) or "(begin)"}
        return [{"role": "system", "content": self.system}, first] if self.system else [first]

    async def step(self, action: dict[str, Any]) -> Step:
        before = self.total
        calls = action.get("tool_calls") or []
        observation: Messages = []
        for one in calls:
            told = await self._called_tool(one["function"])
            observation.append({"role": "tool", "tool_call_id": one["id"], "content": told})
        if not calls:
            observation = [{"role": "user", "content": await self._said(action.get("content") or "")}]
        return Step(observation, self.total - before, self.over, self.outcome())

    def outcome(self) -> dict[str, Any]:
        """What the episode came to if it ended now."""
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

    async def _called_tool(self, function: Mapping[str, Any]) -> str:
        names = [one["function"]["name"] for one in self._tools or ()]
        if function["name"] not in names:
            return self._wrong(f"no tool {str(function['name'])[:80]}; there are {', '.join(names)}")
        text = function["arguments"]
        try:
            arguments = json.loads(text if isinstance(text, str) else json.dumps(text), parse_constant=_no_number)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return self._wrong(f"the arguments of {function['name']} are no JSON object")
        if self._called:
            arguments = {"type": "call_tool", "tool_name": function["name"], "arguments": arguments}
        else:
            arguments = {name: value for name, value in arguments.items() if name != "metadata"}
        return await self._act(arguments)

    async def _said(self, text: str) -> str:
        if not self._text:
            names = ", ".join(one["function"]["name"] for one in self._tools or ())
            return self._wrong(f"act by a tool: {names}")
        return await self._act({self._text: text})

    async def _act(self, action: dict[str, Any]) -> str:
        if self.over:
            return self._wrong("the episode is over")
        self.steps += 1
        self.over = self.steps >= self.max_steps
        try:
            sent = {"type": "step", "data": json.loads(json.dumps(action).encode("utf-8", "replace"))}
            seen = await self._ask(sent)
        except _Refused as error:
            if error.wrong or self.step_errors == "tell":
                return self._wrong(str(error))
            raise EnvironmentFailed(f"the OpenEnv server {self.url} failed at an action: {error}") from None
        self._take(seen)
        return self._shown(seen) or "(nothing to see)"

    def _wrong(self, what: str) -> str:
        self.invalid += 1
        return f"error: {what}"

    def _take(self, seen: Mapping[str, Any]) -> None:
        self.total += float(seen.get("reward") or 0.0)
        self.over = self.over or bool(seen.get("done"))

    def _shown(self, seen: Mapping[str, Any]) -> str:
        observation = dict(seen.get("observation") or {})
        return _result(observation) if self._called and "result" in observation else self.render(observation)

    # The server

    async def _schema(self) -> dict[str, Any]:
        """Of an action."""
        deadline = time.monotonic() + self.patience
        pause = PAUSE
        while True:
            try:
                async with httpx.AsyncClient(timeout=self.timeout) as client:
                    response = await client.get(f"{self.url}/schema")
                if response.status_code == 200:
                    return dict(response.json()["action"])
                what, away = f"{self.url}/schema: HTTP {response.status_code}", response.status_code in PASSING
                again = away
            except httpx.TransportError as error:
                what, away = f"{self.url} cannot be reached: {type(error).__name__}: {error}", passes(error)
                again = True
            except (ValueError, KeyError, TypeError):
                raise EnvironmentFailed(f"{self.url}/schema gave no schema: is it a server of OpenEnv?") from None
            if not again or time.monotonic() + pause > deadline:
                raise (EnvironmentAway if away else EnvironmentFailed)(f"the OpenEnv server {what}")
            await asyncio.sleep(pause)
            pause = min(4.0, 2 * pause)

    async def _listed(self) -> list[dict[str, Any]]:
        """The tools of a server whose actions are calls of them."""
        await self._connected()
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = await self._exchange({"type": "mcp", "data": request})
        found = ((answer.get("data") or {}).get("result") or {}).get("tools")
        if not found:
            raise EnvironmentFailed(f"the OpenEnv server {self.url} lists no tools")
        return [
            {
                "type": "function",
                "function": {
                    "name": str(one["name"]),
                    "description": str(one.get("description") or ""),
                    "parameters": one.get("inputSchema") or one.get("input_schema") or {"type": "object"},
                },
            }
            for one in found
        ]

    async def _connected(self) -> None:
        """A connection with an environment behind it; waits for one where the server is full or not there. Raises
        EnvironmentAway where it stays so."""
        if self._socket is not None:
            return
        client = import_optional("websockets.asyncio.client", EXTRA)
        errors = import_optional("websockets.exceptions", EXTRA)
        parts = urlsplit(f"{self.url}/ws")
        address = urlunsplit(parts._replace(scheme="wss" if parts.scheme == "https" else "ws"))
        deadline = time.monotonic() + self.patience
        pause = PAUSE
        while True:
            try:
                self._socket = await client.connect(address, max_size=MAX_MESSAGE, open_timeout=self.timeout)
                await self._exchange({"type": "state"})  # a server that is full says so to the first message
                return
            except (OSError, TimeoutError, errors.WebSocketException) as error:
                reason = f"{type(error).__name__}: {error}"
                away = passes(error) or isinstance(error, TimeoutError | errors.InvalidMessage)
            except _Refused as error:
                if not error.full:
                    return
                away = True
                reason = f"{error}; bound the episodes at once by collect.concurrency and evaluate.concurrency"
            await self.close()
            if time.monotonic() + pause > deadline:
                kind = EnvironmentAway if away else EnvironmentFailed
                raise kind(f"the OpenEnv server {self.url} takes no connection: {reason}")
            await asyncio.sleep(pause)
            pause = min(4.0, 2 * pause)

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What the server sees after a reset or a step."""
        if self._socket is None:
            raise EnvironmentFailed("step before reset")
        try:
            answer = await self._exchange(message)
        except _Refused as error:
            if message["type"] == "step":
                raise
            raise EnvironmentFailed(f"the OpenEnv server {self.url} failed at {message['type']}: {error}") from None
        seen = answer.get("data")
        if answer.get("type") != "observation" or not isinstance(seen, dict):
            raise EnvironmentFailed(f"the OpenEnv server {self.url} answered {str(answer)[:200]}")
        if not isinstance(seen.get("reward"), int | float | None):
            raise EnvironmentFailed(f"the OpenEnv server {self.url} gave the reward {seen['reward']!r:.100}")
        return seen

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """One message and its answer. Raises _Refused for an error of the server, EnvironmentFailed where there is no
        answer, EnvironmentAway where the line broke."""
        errors = import_optional("websockets.exceptions", EXTRA)
        try:
            async with asyncio.timeout(self.timeout):
                with contextlib.suppress(errors.ConnectionClosed):  # a server that hung up may have said why
                    await self._socket.send(json.dumps(message))
                answer = json.loads(await self._socket.recv())
        except TimeoutError:
            text = f"gave no answer to {message['type']} within {self.timeout:g} s (environment.timeout)"
            raise EnvironmentFailed(f"the OpenEnv server {self.url} {text}") from None
        except errors.ConnectionClosed as error:
            raise EnvironmentAway(f"the OpenEnv server {self.url} closed the connection: {error}") from None
        except ValueError:
            raise EnvironmentFailed(f"the OpenEnv server {self.url} answered what is no JSON") from None
        if not isinstance(answer, dict):
            raise EnvironmentFailed(f"the OpenEnv server {self.url} answered {str(answer)[:200]}")
        if answer.get("type") == "error":
            raise _Refused(answer.get("data") or {})
        return answer


class _Refused(Exception):
    """The server says what is wrong."""

    def __init__(self, data: Mapping[str, Any]):
        code = str(data.get("code", ""))
        self.full, self.wrong = code == FULL, code in WRONG
        details = [
            f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in data.get("errors") or () if one
        ]
        super().__init__("; ".join([str(data.get("message", "it says no reason")), *details])[:1000])


def written_out(observation: dict[str, Any]) -> str:
    """The fields of an observation that hold something; a single text as it is."""
    shown = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
        return text
    lines = [f"{name}: {one if isinstance(one, str) else json.dumps(one)}" for name, one in shown.items()]
    return "\n".join(lines)


def _act(action: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tool whose arguments are an action."""
    required = [name for name in action.get("required") or () if name in fields]
    parameters: dict[str, Any] = {"type": "object", "properties": dict(fields), "required": required}
    if "$defs" in action:
        parameters["$defs"] = action["$defs"]
    about = " ".join(str(action.get("description") or "carries out one action").split())
    return {"type": "function", "function": {"name": ACT.name, "description": about, "parameters": parameters}}


def _result(observation: Mapping[str, Any]) -> str:
    """What a tool said."""
    if error := observation.get("error"):
        return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation["result"]
    if isinstance(result, Mapping) and "data" in result:
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
