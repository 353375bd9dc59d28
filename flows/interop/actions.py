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
from flows.interop.invalid_request import InvalidRequest

Action = dict[str, Any]


def message(text: str) -> Action:
    """Return the action that says a text."""
    return {"role": "assistant", "content": text}


def tool_calls(calls: Sequence[tuple[str, Any]], content: str = "") -> Action:
    """Return the action that calls tools. calls: name and arguments (JSON data or JSON text) of each call."""
    functions = [
        {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
        for name, arguments in calls
    ]
    return {
        "role": "assistant",
        "content": content,
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
            call["id"] = source["id"]
    return action


def _is_call(data: Any) -> bool:
    return isinstance(data, Mapping) and isinstance(data.get("name"), str) and set(data) <= {"name", "arguments"}
