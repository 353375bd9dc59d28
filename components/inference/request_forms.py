"""Parameters of requests that change which tokens are sampled: `response_format`, `tool_choice`, `logit_bias` and
penalties of Chat Completions, `text` and `tool_choice` of Responses.

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
from components.inference.request_bodies import RequestBody, read_body, unknown_keys
from components.inference.response_form import ANY_OBJECT, FREE, NO_CALLS, NO_CHANGE, LogitChange, ResponseForm
from components.specs.wording import shortened

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
