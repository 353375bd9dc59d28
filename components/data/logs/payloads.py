"""Requests and responses of chat models as logs hold them, as messages and tools in OpenAI's JSON format.

A message has OpenAI's shape, LangChain's (`{"lc": 1, "id": [..., "AIMessage"], "kwargs": {...}}`, or `type` and `data`)
or that of OpenTelemetry's conventions for generative AI (`role` and `parts`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from components.data.columns import parsed
from components.data.examples import RowProblem

_LANGCHAIN = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
"""Roles by LangChain's types of messages."""


def call(request: Any, response: Any, tools: Any = None) -> dict[str, Any]:
    """Return messages, answers and tools of a call. request: text, messages, or an object with `messages` and `tools`;
    response: text, a message, or an object with `choices`, `generations` or `messages`. tools: where the request has
    none."""
    request, response = parsed(request), parsed(response)
    if isinstance(request, Mapping):
        tools = request.get("tools") or tools
        request = request.get("messages") or request.get("input") or request.get("prompt")
    flat = map(parsed, parsed(tools) or [])
    return {"messages": messages(request, "user"), "answers": answers(response), "tools": list(map(_tool, flat))}


def answers(response: Any) -> list[dict[str, Any]]:
    """Return the alternative answers of a response; none if there is no response."""
    if not isinstance(response, Mapping):
        return messages(response, "assistant")[-1:]
    if isinstance(choices := response.get("choices"), list):
        return messages([choice.get("message") for choice in choices if isinstance(choice, Mapping)])
    if isinstance(batches := response.get("generations"), list):
        batch = batches[0] if batches and isinstance(batches[0], list) else batches
        return messages([item.get("message") for item in batch if isinstance(item, Mapping)])
    if isinstance(response.get("messages"), list):
        return messages(response["messages"])[-1:]
    inner = next((response[name] for name in ("message", "output") if response.get(name)), None)
    return answers(inner) if inner is not None else messages([response] if response else None)


def messages(value: Any, role: str = "assistant") -> list[dict[str, Any]]:
    """Return messages in OpenAI's format. role: of a text that stands for a message. Raises RowProblem."""
    value = parsed(value)
    if value is None or value == "":  # an empty cell
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list) and value and isinstance(value[0], list):  # LangChain: a batch of one conversation
        value = value[0]
    return [message for item in (value if isinstance(value, list) else [value]) for message in _openai(item, role)]


def _tool(tool: Any) -> Any:
    """Return a tool without a type beside its name, as OpenTelemetry and OpenAI's Responses write it."""
    return {name: tool[name] for name in tool if name != "type"} if "function" not in tool else tool


def _openai(message: Any, role: str) -> Iterator[dict[str, Any]]:
    if not isinstance(message, Mapping):
        raise RowProblem(f"expected a message, got {type(message).__name__}")
    kind = message.get("type")
    if isinstance(inner := message.get("kwargs", message.get("data")), Mapping):
        kind = inner.get("type", kind)
        kind = str(message["id"][-1]).removesuffix("Chunk").removesuffix("Message").lower() if "lc" in message else kind
        message = inner
    if isinstance(parts := parsed(message.get("parts")), list):
        yield from _of_parts(str(message.get("role", role)), parts)
        return
    calls = [
        {"id": item.get("id"), "function": {"name": item["name"], "arguments": item["args"]}}
        if isinstance(item, Mapping) and "name" in item and "args" in item
        else item
        for item in parsed(message.get("tool_calls")) or []
    ]
    content = parsed(message["content"]) if str(message.get("content")).startswith('[{"') else message.get("content")
    yield {**message, "role": message.get("role") or _LANGCHAIN.get(str(kind), role), "content": content} | (
        {"tool_calls": calls} if calls else {}
    )


def _of_parts(role: str, parts: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield a message of OpenTelemetry's parts; each result of a tool is a message of its own."""
    content: list[Any] = []
    calls = []
    for part in parts:
        match part:
            case {"type": "tool_call", "name": str(name)}:
                calls.append({"id": part.get("id"), "function": {"name": name, "arguments": part.get("arguments")}})
            case {"type": "tool_call_response"}:
                result = part.get("response", part.get("result"))
                text = result if isinstance(result, str) else json.dumps(result)
                yield {"role": "tool", "tool_call_id": part.get("id"), "content": text}
            case {"type": "text" | "reasoning" as name, "content": str(text)}:
                content.append({"type": name, "text": text})
            case {"modality": str(kind)} | {"type": str(kind)}:
                content.append({"type": kind})
            case _:
                raise RowProblem(f"a message of the role {role} has a part without a type")
    if content or calls or role != "tool":
        yield {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})
