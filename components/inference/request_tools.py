"""Tools that a request offers: functions, with the keys of OpenAI's specification and no others.

Chat Completions has the function in a field (`{"type": "function", "function": {"name": ...}}`), Responses beside the
type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from components.errors import Problem, SpecError
from components.inference.request_bodies import Off, RequestBody, read_body
from components.specs.wording import shortened

MAX_TOOLS = 512
"""Maximum number of tools per request."""
LONGEST_NAME = 256
"""Maximum length of the name of a tool, an author or a model, and of a stop string."""


class OfferedFunction(RequestBody):
    """A function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None


class ChatTool(RequestBody):
    """A tool of Chat Completions."""

    type: Literal["function"]
    function: OfferedFunction


class ResponsesTool(OfferedFunction):
    """A tool of Responses. Clients send the other fields at their neutral values."""

    type: Literal["function"]
    allowed_callers: None = None
    defer_loading: Off | None = None
    output_schema: None = None


def chat_tool(tool: dict[str, Any], path: str, problems: list[Problem]) -> dict[str, Any]:
    """Return a tool of Chat Completions in the engine's format; add its problems."""
    if "strict" in tool:
        problems.append(Problem(f"{path}.strict", "belongs into `function`, beside its name"))
    try:
        function = read_body(ChatTool, {name: tool[name] for name in tool if name != "strict"}, path).function
    except SpecError as error:
        problems += error.problems
        return _named(tool.get("function"))
    check_function(function, f"{path}.function", problems)
    return {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}


def responses_tool(data: dict[str, Any], path: str, problems: list[Problem]) -> dict[str, Any]:
    """Return a tool of Responses in the engine's format; add its problems."""
    if data.get("type") != "function":
        expected = "this server has no built-in tools; expected type 'function'"
        problems.append(Problem(f"{path}.type", f"{shortened(data.get('type'))}: {expected}"))
        return {}
    try:
        tool = read_body(ResponsesTool, data, path)
    except SpecError as error:
        problems += error.problems
        return _named(data)
    check_function(tool, path, problems)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _named(function: Any) -> dict[str, Any]:
    """Return an invalid tool with its name alone, to which `tool_choice` can refer."""
    name = function.get("name") if isinstance(function, dict) else None
    return {"function": {"name": name}} if isinstance(name, str) else {}


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Return True for a strict tool of Chat Completions."""
    function = tool.get("function")
    return isinstance(function, dict) and function.get("strict") is True


def check_function(function: OfferedFunction, path: str, problems: list[Problem]) -> None:
    """Add the problems of a function's name and JSON schema, which chat templates read."""
    if not 0 < len(function.name) <= LONGEST_NAME:
        problems.append(Problem(f"{path}.name", f"expected 1 to {LONGEST_NAME} characters"))
    schema = function.parameters or {}
    if schema.get("type", "object") != "object":
        problems.append(Problem(f"{path}.parameters.type", f"{shortened(schema['type'])}: expected 'object'"))
    elif not isinstance(schema.get("properties"), dict | None):
        text = f"{shortened(schema['properties'])}: expected an object with a schema for each parameter"
        problems.append(Problem(f"{path}.parameters.properties", text))
