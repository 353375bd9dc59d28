"""Messages of imported conversations, in the shapes of OpenAI and ShareGPT.

OpenAI: `role`, `content` (text, or parts of type text), `tool_calls`, `tool_call_id`, and `weight` 0 for a message that
is not trained on. ShareGPT: `from`, `value`, and in AgentTraj `loss`. Calls in the text of a ShareGPT message are
tagged: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Reasoning of an assistant message is a key of its own (`reasoning_content`, `reasoning` or `thinking`), a part of the
content of type `thinking` or `reasoning`, or a block `<think>...</think>` with which the text begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from components.data.columns import kind_of, parsed
from components.data.examples import RowProblem
from components.trajectories.call_forms import FORMS
from components.trajectories.reasoning import THINK
from components.trajectories.schema import Message, Role, ToolCall

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_TAG = "<tool_call>"
_REASONING = ("reasoning_content", "reasoning", "thinking")


def read_messages(value: Any) -> list[Message]:
    """Return the messages of a list in OpenAI's or ShareGPT's shape, or of JSON text with one. Raises RowProblem."""
    value = parsed(value)
    if not isinstance(value, list):
        raise RowProblem(f"expected a list of messages, got {kind_of(value)}")
    if not value:
        raise RowProblem("there are no messages", "empty")
    return _linked([_message(number, data) for number, data in enumerate(value)])


def answer(text: str) -> Message:
    """Return a text of the assistant as a message, with the reasoning with which it begins."""
    reasoning, content = THINK.split(text) if THINK.end in text else (None, text)
    return Message("assistant", content, reasoning=reasoning)


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a list in OpenAI's format, with or without the surrounding `{"type": "function"}`, or of JSON
    text with one. Raises RowProblem."""
    value = parsed(value)
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        raise RowProblem("tools: expected a list of tools")
    tools = []
    for tool in map(without_nulls, value):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowProblem("tools: expected objects with the name, description and parameters of a function")
        parameters = parsed(function.get("parameters") or {})
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
            raise RowProblem(f"tools: the parameters of {function['name']} are not a JSON schema of an object")
        if not isinstance(function.get("description", ""), str):
            raise RowProblem(f"tools: the description of {function['name']} is not text")
        tools.append({"type": "function", "function": {**function, "parameters": parameters}})
    return tools


def context_only(messages: Sequence[Message]) -> list[Message]:
    """Return messages of a prompt, none of which is trained on."""
    return [replace(message, trained=False) if message.role == "assistant" else message for message in messages]


def _message(number: int, data: Any) -> Message:
    where = f"message {number}"
    if not isinstance(data, Mapping):
        raise RowProblem(f"{where}: expected an object with role and content, or from and value")
    name = data.get("role", data.get("from"))
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise RowProblem(f"{where}: role {name!r:.40}; expected one of {', '.join(_ROLES)}")
    content, reasoning = _content(where, data, role)
    calls = _calls(where, data, number)
    if role == "assistant" and name == "function_call":
        calls, content = _called(where, parsed(content), number), ""
    elif role == "assistant" and not calls and "from" in data and _TAG in content:
        content, calls = _tagged(content, number)
    reference = data.get("tool_call_id")
    trained = role != "assistant" or not (data.get("loss") is False or data.get("weight") in (0, False))
    reference = reference if isinstance(reference, str) else None
    return Message(role, content, calls, reference, trained=trained, reasoning=reasoning)


def _content(where: str, data: Mapping[str, Any], role: str) -> tuple[str, str | None]:
    """Return content and reasoning of a message."""
    content, parts = data.get("content", data.get("value")), []
    if isinstance(content, list):
        parts = [
            part for part in content if isinstance(part, Mapping) and part.get("type") in ("thinking", "reasoning")
        ]
        content = [part for part in content if part not in parts]
    text = _text(where, content)
    if role != "assistant":
        return text, None
    for name in _REASONING:
        if not isinstance(data.get(name), str | bool | None):  # a boolean says that the model may reason
            raise RowProblem(f"{where}: {name} is not text")
        if isinstance(data.get(name), str) and data[name]:
            return text, data[name]
    if parts:
        return text, "".join(_reasoning(where, part) for part in parts)
    message = answer(text)
    return message.content, message.reasoning


def _reasoning(where: str, part: Mapping[str, Any]) -> str:
    """Return the text of a part of type `thinking` or `reasoning`: Anthropic's and Mistral's `thinking`, or OpenAI's
    `content`, or else its `summary`."""
    texts = [
        part[name] for name in ("thinking", "reasoning", "text", "content", "summary") if part.get(name) is not None
    ]
    if not texts:
        raise RowProblem(f"{where} has a part of type {part['type']!r} without text")
    return _text(where, next(filter(None, texts), ""))


def _text(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = str(part.get("type") if isinstance(part, Mapping) else type(part).__name__)
            medium = next((medium for medium in ("image", "audio", "video") if medium in kind), None)
            text = f"contains {medium}" if medium else "has content"
            raise RowProblem(
                f"{where} {text} of type {kind!r:.40}; expected text: models here read and write text only"
            )
        parts.append(text)
    return "".join(parts)


def _calls(where: str, data: Mapping[str, Any], number: int) -> list[ToolCall]:
    """Return the calls of a message in OpenAI's format, of today or with `function_call`."""
    calls = parsed(data.get("tool_calls")) or []
    if not isinstance(calls, list):
        raise RowProblem(f"{where}: tool_calls is not a list")
    if isinstance(data.get("function_call"), Mapping):
        calls = [*calls, {"function": data["function_call"]}]
    return _called(where, calls, number)


def _called(where: str, calls: Any, number: int) -> list[ToolCall]:
    result = []
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RowProblem(f"{where}: a tool call without the name of a function")
        arguments = function.get("arguments")
        if arguments is None or arguments == "":
            arguments = {}
        if isinstance(arguments, str):
            try:
                value = json.loads(arguments)
            except (ValueError, RecursionError):
                value = None
        else:
            value = without_nulls(arguments)
            arguments = json.dumps(value)
        if not isinstance(value, dict):
            raise RowProblem(f"{where}: the arguments of {function['name']} are not a JSON object")
        name = call.get("id")
        result.append(
            ToolCall(name if isinstance(name, str) else f"call_{number}_{index}", function["name"], arguments)
        )
    return result


def _tagged(content: str, number: int) -> tuple[str, list[ToolCall]]:
    """Return text and calls of a message with tagged calls. An invalid call stays in the text, as in an episode."""
    try:
        text, calls = FORMS["tagged_json"].read(content)
    except (ValueError, RecursionError):
        return content, []
    return text, [ToolCall(f"call_{number}_{index}", *call) for index, call in enumerate(calls)]


def _linked(messages: list[Message]) -> list[Message]:
    """Return the messages with the id of a call in each tool message that names none: that of the next call without a
    result."""
    open_calls: list[str] = []
    for message in messages:
        if message.role == "assistant":
            open_calls = [call.id for call in message.tool_calls]
        elif message.role == "tool":
            if message.tool_call_id is None and open_calls:
                message.tool_call_id = open_calls[0]
            if message.tool_call_id in open_calls:
                open_calls.remove(message.tool_call_id)
    return messages


def without_nulls(value: Any) -> Any:
    """Return JSON data without keys whose value is null: tables fill the keys that an object lacks with nulls."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
