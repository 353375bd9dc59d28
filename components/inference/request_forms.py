"""Parameters of requests that change which tokens are sampled: `tools`, `tool_choice`, `response_format`, `logit_bias`
and penalties of Chat Completions, `tools`, `tool_choice` and `text` of Responses.

Tools are functions, with the keys of OpenAI's specification and no others. Chat Completions has the function in a field
(`{"type": "function", "function": {"name": ...}}`), Responses beside the type.

A schema may be any JSON schema that the engine enforces; `strict` makes no difference there, because a schema is always
enforced. The arguments of a required call are held to the schema of the tool; those of other calls if a tool is
`strict`, for all tools of the request. `tool_choice: "none"` offers no tools, so that the prompt does not show them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from components.errors import Problem, SpecError
from components.inference.protocol import ANY_OBJECT, FREE, NO_CALLS, NO_CHANGE, LogitChange, ResponseForm
from components.inference.request_bodies import LONGEST_NAME, Off, RequestBody, read_body, unknown_keys
from components.specs.wording import shortened

MAX_TOOLS = 512
"""Maximum number of tools per request."""
LONGEST_SCHEMA = 100_000
"""Maximum length of a schema in characters, as JSON text."""
MAX_BIASES = 1024
"""Maximum number of tokens in `logit_bias`."""
CHAT_FIELDS = ("response_format", "tool_choice")
RESPONSES_FIELDS = ("text", "tool_choice")
LOGIT_FIELDS = ("logit_bias", "presence_penalty", "frequency_penalty")

_NAME = re.compile(r"[\w.-]{1,128}")
"""Name of a function that a call can write."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")


def _canonical(token: str) -> str:
    """Return the key of a token. It has one spelling, so that no token has two values."""
    if not _TOKEN_ID.fullmatch(token):
        raise ValueError('a token id in digits without leading zeros or spaces, such as "7"')
    return token


Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class LogitBody(RequestBody):
    """Changes of the logits."""

    logit_bias: dict[Annotated[str, AfterValidator(_canonical)], Bias] | None = Field(None, max_length=MAX_BIASES)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


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


class TextBody(RequestBody):
    """`text` of Responses."""

    format: dict[str, Any] | None = None
    verbosity: None = None


def chat_form(
    body: Mapping[str, Any], tools: Sequence[dict[str, Any]], strict: bool, problems: list[Problem]
) -> ResponseForm:
    """Return the form that a chat completions request demands. tools: offered tools in the engine's format. strict:
    True if one of them is strict. Adds problems."""
    wanted = body.get("response_format")
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    content = FREE
    if kind == "json_schema" and isinstance(wanted, dict):
        problems += unknown_keys(wanted, ("type", "json_schema"), "response_format")
        content = _schema_form(SchemaFormat, wanted.get("json_schema"), "response_format.json_schema", problems)
    elif wanted is not None:
        content = _plain_form(wanted, kind, "response_format", problems)
    choice = _choice(ChatChoice, body.get("tool_choice"), problems)
    return _combined(content, _calls(choice, tools, strict, problems), bool(tools), "response_format", problems)


def responses_form(
    body: Mapping[str, Any], tools: Sequence[dict[str, Any]], strict: bool, problems: list[Problem]
) -> ResponseForm:
    """Return the form that a Responses request demands; as `chat_form`."""
    content = FREE
    try:
        options = {} if body.get("text") is None else body["text"]
        text = read_body(TextBody, options, "text")
    except SpecError as error:
        problems += error.problems
        text = TextBody()
    kind = (text.format or {}).get("type")
    if kind == "json_schema":
        content = _schema_form(NamedFormat, text.format, "text.format", problems)
    elif text.format is not None:
        content = _plain_form(text.format, kind, "text.format", problems)
    choice = _choice(ResponsesChoice, body.get("tool_choice"), problems)
    return _combined(content, _calls(choice, tools, strict, problems), bool(tools), "text.format", problems)


def with_single_call(form: ResponseForm, allowed: bool, problems: list[Problem]) -> ResponseForm:
    """Return a form that holds the response to one call at most, with arguments of its tool's schema, as
    `parallel_tool_calls: false` demands. allowed: as in `logit_change`. Adds problems."""
    if form.calls is not None:  # none, or a required one, which is single
        return form
    if not allowed:
        text = "false would hold the policy to one call, but training needs its own responses; leave it out"
        problems.append(Problem("parallel_tool_calls", text))
    return replace(form, strict=True, single=True)


def logit_change(body: Mapping[str, Any], allowed: bool, problems: list[Problem]) -> LogitChange:
    """Return the changes of the logits that a request demands. allowed: False if the server records responses for
    training, which uses the distribution of the experiment. Adds problems."""
    try:
        data = {name: body[name] for name in LOGIT_FIELDS if name in body}
        parsed = read_body(LogitBody, data)
    except SpecError as error:
        problems += error.problems
        return NO_CHANGE
    bias = tuple((int(token), value) for token, value in sorted((parsed.logit_bias or {}).items()) if value)
    change = LogitChange(bias, parsed.presence_penalty or 0.0, parsed.frequency_penalty or 0.0)
    if change != NO_CHANGE and not allowed:
        names = {"logit_bias": change.bias, "presence_penalty": change.presence, "frequency_penalty": change.frequency}
        text = "the experiment's collect sets the sampling distribution, which training uses; leave it out"
        problems += [Problem(name, text) for name, value in names.items() if value]
        return NO_CHANGE
    return change


def _schema_form(cls: type[SchemaFormat], data: Any, path: str, problems: list[Problem]) -> ResponseForm:
    try:
        named = read_body(cls, data, path, apart=("schema",))
    except SpecError as error:
        problems += error.problems
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


def _plain_form(data: Any, kind: Any, path: str, problems: list[Problem]) -> ResponseForm:
    """Return the form of `text` and `json_object`."""
    if not isinstance(data, dict) or kind not in ("text", "json_object"):
        place = f"{path}.type" if isinstance(data, dict) else path
        text = f"{shortened(kind if isinstance(data, dict) else data)} is not supported"
        problems.append(Problem(place, f"{text}; expected type 'text', 'json_object' or 'json_schema'"))
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
    try:
        chosen = read_body(cls, choice, "tool_choice")
    except SpecError as error:
        problems += error.problems
        return None
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
    """Return the form of a response with this content or these calls. offered: True if the request has tools."""
    if content == FREE:
        return calls
    if calls.calls:
        text = "a response that must call a tool has no content with a schema; send one of it and tool_choice"
        problems.append(Problem(path, text))
    either = offered and calls != NO_CALLS
    return replace(content, calls=None if either else (), strict=either)


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
