"""Parameters of requests that demand tools or a form: `tools`, `tool_choice` and `response_format` of Chat Completions,
`tools`, `tool_choice` and `text` of Responses, `tools`, `tool_choice` and
`output_config.format` of Anthropic's Messages.

Tools are functions, with the keys of the API's specification and no others. Chat Completions has the function in a
field (`{"type": "function", "function": {"name": ...}}`), Responses beside the type, Messages without one.

A schema may be any JSON schema that the engine enforces; `strict` makes no difference there, because a schema is always
enforced. The arguments of a required call are held to the schema of the tool; those of other calls if a tool is
`strict`, for all tools of the request. `tool_choice: "none"` offers no tools, so that the prompt does not show them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import Problem
from components.inference.protocol import ANY_OBJECT, FREE, NO_CALLS, ResponseForm
from components.inference.request_bodies import (
    LONGEST_NAME,
    Alternatives,
    Off,
    RequestBody,
    RequestContext,
    read_part,
    unknown_keys,
)
from components.specs.wording import shortened

MAX_TOOLS = 512
"""Maximum number of tools per request."""
LONGEST_SCHEMA = 100_000
"""Maximum length of a schema in characters, as JSON text."""

_NAME = re.compile(r"[\w.-]{1,128}")
"""Name of a function that a call can write."""


class SchemaFormat(RequestBody):
    """A named schema, without the schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    strict: bool | None = None


class NamedFormat(SchemaFormat):
    """A named schema as `text.format` of Responses."""

    type: Literal["json_schema"]


class ChosenFunction(RequestBody):
    """The function that a response must call."""

    name: str


class ChatChoice(RequestBody):
    """`tool_choice` of Chat Completions."""

    type: Literal["function"]
    function: ChosenFunction


class ResponsesChoice(ChosenFunction):
    """`tool_choice` of Responses."""

    type: Literal["function"]


class ToolsBody(RequestBody):
    """Parameters that Chat Completions and Responses share."""

    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    """False holds a response to one call at most."""
    top_logprobs: Alternatives | None = None
    """Number of most likely tokens with each log-probability."""
    metadata: dict[str, Any] | None = None
    """The caller's labels; they have no effect."""


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


class CacheControl(RequestBody):
    """A hint of Anthropic's clients where a shared prefix ends."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class MessagesTool(RequestBody):
    """A tool of Messages. Clients send the other fields at their neutral values."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    """JSON schema of the input."""
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Off | None = None
    eager_input_streaming: bool | None = None
    """Calls are sent when the answer is complete, with and without it."""
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None


class MessagesChoice(RequestBody):
    """`tool_choice` of Messages."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool of type `tool`."""
    disable_parallel_tool_use: bool | None = None


@dataclass(frozen=True)
class ToolOffer:
    """Tools that a request offers, in the engine's format, and the form that it demands of the response."""

    tools: list[dict[str, Any]]
    form: ResponseForm


def chat_offer(body: ToolsBody, wanted: Any, context: RequestContext, problems: list[Problem]) -> ToolOffer:
    """Return the offer of a chat completions request. wanted: `response_format`. Adds problems."""
    listed = body.tools or []
    tools = [_chat_tool(tool, f"tools.{index}", problems) for index, tool in enumerate(listed)]
    strict = any(isinstance(tool.get("function"), dict) and tool["function"].get("strict") is True for tool in listed)
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        problems += unknown_keys(wanted, ("type", "json_schema"), "response_format")
        content = _schema_form(SchemaFormat, wanted.get("json_schema"), "response_format.json_schema", problems)
    else:
        content = _plain_form(wanted, "response_format", problems)
    choice = _choice(ChatChoice, body.tool_choice, problems)
    calls = _calls(choice, tools, strict and not context.recorded, problems)
    form = _combined(content, calls, bool(tools), "response_format", problems)
    single = "parallel_tool_calls" if body.parallel_tool_calls is False else None
    return _offer(tools, form, single, context, problems)


def responses_offer(body: ToolsBody, wanted: Any, context: RequestContext, problems: list[Problem]) -> ToolOffer:
    """Return the offer of a Responses request. wanted: `text.format`. Adds problems."""
    listed = body.tools or []
    tools = [_responses_tool(tool, f"tools.{index}", problems) for index, tool in enumerate(listed)]
    strict = any(tool.get("strict") is True for tool in listed)
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        content = _schema_form(NamedFormat, wanted, "text.format", problems)
    else:
        content = _plain_form(wanted, "text.format", problems)
    choice = _choice(ResponsesChoice, body.tool_choice, problems)
    calls = _calls(choice, tools, strict and not context.recorded, problems)
    form = _combined(content, calls, bool(tools), "text.format", problems)
    single = "parallel_tool_calls" if body.parallel_tool_calls is False else None
    return _offer(tools, form, single, context, problems)


def messages_offer(
    listed: list[dict[str, Any]],
    chosen: dict[str, Any] | None,
    wanted: dict[str, Any] | None,
    context: RequestContext,
    problems: list[Problem],
) -> ToolOffer:
    """Return the offer of a request of Messages. listed: `tools`. chosen: `tool_choice`. wanted:
    `output_config.format`. Adds problems."""
    tools = [_messages_tool(tool, f"tools.{index}", problems) for index, tool in enumerate(listed)]
    path, content = "output_config.format", FREE
    if wanted is not None:
        problems += unknown_keys(wanted, ("type", "schema"), path)
        content = _schema_form(NamedFormat, {"name": "response", **wanted}, path, problems)
    choice = None if chosen is None else read_part(MessagesChoice, chosen, "tool_choice", problems)
    picked: str | ChosenFunction | None = None
    if choice is not None:
        if (choice.type == "tool") != (choice.name is not None):
            problems.append(Problem("tool_choice.name", "belongs to type 'tool', and to no other"))
        words = {"auto": None, "any": "required", "none": "none"}
        picked = words[choice.type] if choice.type != "tool" else ChosenFunction(name=choice.name or "")
    strict = any(tool.get("strict") is True for tool in listed)
    calls = _calls(picked, tools, strict and not context.recorded, problems)
    form = _combined(content, calls, bool(tools), path, problems)
    single = "tool_choice.disable_parallel_tool_use" if choice and choice.disable_parallel_tool_use else None
    return _offer(tools, form, single, context, problems)


def _chat_tool(tool: dict[str, Any], path: str, problems: list[Problem]) -> dict[str, Any]:
    """Return a tool of Chat Completions in the engine's format."""
    if "strict" in tool:
        problems.append(Problem(f"{path}.strict", "belongs into `function`, beside its name"))
    read = read_part(ChatTool, {name: tool[name] for name in tool if name != "strict"}, path, problems)
    if read is None:
        return _named(tool.get("function"))
    function = read.function
    _check_function(function.name, function.parameters, f"{path}.function", "parameters", problems)
    return {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}


def _responses_tool(data: dict[str, Any], path: str, problems: list[Problem]) -> dict[str, Any]:
    """Return a tool of Responses in the engine's format."""
    if data.get("type") != "function":
        expected = "this server has no built-in tools; expected type 'function'"
        problems.append(Problem(f"{path}.type", f"{shortened(data.get('type'))}: {expected}"))
        return {}
    tool = read_part(ResponsesTool, data, path, problems)
    if tool is None:
        return _named(data)
    return _checked_tool(tool.name, tool.description, tool.parameters, path, "parameters", problems)


def _messages_tool(data: dict[str, Any], path: str, problems: list[Problem]) -> dict[str, Any]:
    """Return a tool of Messages in the engine's format."""
    if data.get("type") not in (None, "custom"):
        expected = "this server has no built-in tools; expected type 'custom', or none"
        problems.append(Problem(f"{path}.type", f"{shortened(data['type'])}: {expected}"))
        return {}
    tool = read_part(MessagesTool, data, path, problems)
    if tool is None:
        return _named(data)
    return _checked_tool(tool.name, tool.description, tool.input_schema, path, "input_schema", problems)


def _checked_tool(
    name: str, description: str | None, schema: dict[str, Any] | None, path: str, key: str, problems: list[Problem]
) -> dict[str, Any]:
    """Return a tool in the engine's format. key: name of the schema in the API. Adds problems."""
    _check_function(name, schema, path, key, problems)
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _named(function: Any) -> dict[str, Any]:
    """Return an invalid tool with its name alone, to which `tool_choice` can refer."""
    name = function.get("name") if isinstance(function, dict) else None
    return {"function": {"name": name}} if isinstance(name, str) else {}


def _check_function(name: str, schema: dict[str, Any] | None, path: str, key: str, problems: list[Problem]) -> None:
    """Add the problems of a function's name and JSON schema, which chat templates read. key: name of the schema."""
    if not 0 < len(name) <= LONGEST_NAME:
        problems.append(Problem(f"{path}.name", f"expected 1 to {LONGEST_NAME} characters"))
    schema = schema or {}
    if schema.get("type", "object") != "object":
        problems.append(Problem(f"{path}.{key}.type", f"{shortened(schema['type'])}: expected 'object'"))
    elif not isinstance(schema.get("properties"), dict | None):
        text = f"{shortened(schema['properties'])}: expected an object with a schema for each parameter"
        problems.append(Problem(f"{path}.{key}.properties", text))


def _schema_form(cls: type[SchemaFormat], data: Any, path: str, problems: list[Problem]) -> ResponseForm:
    named = read_part(cls, data, path, problems, apart=("schema",))
    if named is None:
        return FREE
    schema = data.get("schema")
    if not isinstance(schema, dict):
        problems.append(Problem(f"{path}.schema", f"{shortened(schema)}: expected a JSON schema, an object"))
        return FREE
    text = json.dumps(schema)
    if len(text) > LONGEST_SCHEMA:
        problems.append(Problem(f"{path}.schema", f"has {len(text)} characters; expected {LONGEST_SCHEMA} at most"))
        return FREE
    return ResponseForm(json_schema=text, schema_name=named.name)


def _plain_form(data: Any, path: str, problems: list[Problem]) -> ResponseForm:
    """Return the form of `text`, `json_object` and None."""
    if data is None:
        return FREE
    kind = data.get("type") if isinstance(data, dict) else data
    if not isinstance(data, dict) or kind not in ("text", "json_object"):
        place = f"{path}.type" if isinstance(data, dict) else path
        text = f"{shortened(kind)} is not supported; expected type 'text', 'json_object' or 'json_schema'"
        problems.append(Problem(place, text))
        return FREE
    problems += unknown_keys(data, ("type",), path)
    return ResponseForm(json_schema=ANY_OBJECT) if kind == "json_object" else FREE


def _choice(
    cls: type[ChatChoice] | type[ResponsesChoice], choice: Any, problems: list[Problem]
) -> str | ChosenFunction | None:
    """Return a tool choice: a word, or a function. Adds problems; a choice with problems is None."""
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    if not isinstance(choice, dict) or choice.get("type", "function") != "function":
        expected = "'none', 'auto', 'required' or one function by its name"
        problems.append(Problem("tool_choice", f"{shortened(choice)} is not supported; expected {expected}"))
        return None
    chosen = read_part(cls, choice, "tool_choice", problems)
    return chosen.function if isinstance(chosen, ChatChoice) else chosen


def _calls(
    choice: str | ChosenFunction | None, tools: Sequence[dict[str, Any]], strict: bool, problems: list[Problem]
) -> ResponseForm:
    """Return the form of a tool choice: a word, or a ChosenFunction."""
    names = tuple(tool["function"]["name"] for tool in tools if isinstance(tool.get("function"), dict))
    problems += [
        Problem("tools", f"{shortened(name)} is the name of several tools; expected a name for each")
        for name, count in Counter(names).items()
        if count > 1
    ]
    if choice == "none":
        return NO_CALLS
    if choice in (None, "auto") and not strict:
        return FREE
    problems += [
        Problem("tools", f"{shortened(name)} cannot be called by name; expected letters, digits, _, . and - in names")
        for name in names
        if not _NAME.fullmatch(name)
    ]
    if choice in (None, "auto"):
        return ResponseForm(strict=True)
    if isinstance(choice, str):  # 'required'
        if not names:
            problems.append(Problem("tool_choice", "'required' needs tools"))
        return ResponseForm(calls=names)
    if choice.name not in names:
        text = f"{shortened(choice.name)} is none of the tools: {', '.join(names) or 'the request has none'}"
        problems.append(Problem("tool_choice", text))
    return ResponseForm(calls=(choice.name,))


def _combined(
    content: ResponseForm, calls: ResponseForm, offered: bool, path: str, problems: list[Problem]
) -> ResponseForm:
    """Return the form of a response with this content or these calls. offered: True if the request has tools. path: of
    the content's form."""
    if content == FREE:
        return calls
    if calls.calls:
        text = "a response that must call a tool has no content with a schema; send one of it and tool_choice"
        problems.append(Problem(path, text))
    either = offered and calls != NO_CALLS
    return replace(content, calls=None if either else (), strict=either)


def _offer(
    tools: list[dict[str, Any]],
    form: ResponseForm,
    single: str | None,
    context: RequestContext,
    problems: list[Problem],
) -> ToolOffer:
    """Return the offer of tools. single: parameter that demands one call at most; None without it."""
    if single is not None and tools and form.calls is None:  # else none, or a required one
        if context.recorded:
            text = "would hold the policy to one call, but training needs its own responses; leave it out"
            problems.append(Problem(single, text))
        form = replace(form, strict=True, single=True)
    return ToolOffer([] if form.without_calls else tools, form)
