"""Actions from other programs, as assistant messages in OpenAI's format.

Text is the content of a message, unless the environment has tools and the text is a tool call as JSON:

    {"name": "lookup", "arguments": {"order": "B4512"}}         one call
    [{"name": ..., "arguments": ...}, ...]                      several calls in one step
    {"role": "assistant", "content": ..., "tool_calls": [...]}  a whole message
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from components.json_text import reject_constant


class InvalidRequest(ValueError):
    """Request that cannot be executed: a step before the reset or after the end, an unknown scenario, an action that is
    no action. Each protocol reports it in its own terms."""


Action = dict[str, Any]


def message(text: str) -> Action:
    """Return the action that says a text. Raises InvalidRequest for a text that is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text has a lone surrogate at character {error.start}") from None
    return {"role": "assistant", "content": text}


def tool_calls(calls: Sequence[tuple[str, Any]], content: str = "") -> Action:
    """Return the action that calls tools. calls: name and arguments (JSON data or JSON text) of each call.
    Raises InvalidRequest for arguments that are not JSON."""
    functions = [{"name": name, "arguments": _arguments(name, arguments)} for name, arguments in calls]
    return {
        **message(content),
        "tool_calls": [
            {"id": f"call_{index}", "type": "function", "function": function}
            for index, function in enumerate(functions)
        ],
    }


def from_text(text: str, has_tools: bool) -> Action:
    """Return the action of a text. has_tools: JSON of a tool call is a call. Raises InvalidRequest for a message with
    invalid tool calls."""
    if not has_tools or text.lstrip()[:1] not in ("{", "["):
        return message(text)
    try:
        data = json.loads(text, parse_constant=reject_constant)
    except (ValueError, RecursionError):
        return message(text)
    calls = data if isinstance(data, list) else [data]
    if calls and all(_is_call(call) for call in calls):
        return tool_calls([(call["name"], call.get("arguments", {})) for call in calls])
    if isinstance(data, dict) and data.get("role") == "assistant":
        return from_message(data)
    return message(text)


def from_message(data: Mapping[str, Any]) -> Action:
    """Return a validated assistant message. Raises InvalidRequest, naming the part that is wrong."""
    content = data.get("content")
    if content is not None and not isinstance(content, str):
        raise InvalidRequest(f"content = {content!r:.80}: expected text")
    calls = data.get("tool_calls") or []
    if not isinstance(calls, list):
        raise InvalidRequest(f"tool_calls = {calls!r:.80}: expected a list of calls")
    parsed = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            expected = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise InvalidRequest(f"tool_calls[{index}] = {call!r:.80}: expected {expected}")
        parsed.append((function["name"], function.get("arguments", {})))
    action = tool_calls(parsed, content or "") if parsed else message(content or "")
    for call, source in zip(action.get("tool_calls", ()), calls, strict=False):
        if isinstance(source.get("id"), str):
            call["id"] = source["id"].encode("utf-8", "replace").decode()
    return action


def _arguments(name: str, arguments: Any) -> str:
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
        f"{name}{text}".encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the arguments of {name!r:.80} are not valid JSON: {error}"[:300]) from None
    return text


def _is_call(data: Any) -> bool:
    return isinstance(data, Mapping) and isinstance(data.get("name"), str) and set(data) <= {"name", "arguments"}
