"""Items of a Responses conversation as messages of the engine protocol.

Messages, function calls and function call outputs are separate items. Text and calls of one response are merged into
one assistant message. Reasoning items are discarded.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import Problem, SpecError
from components.inference.request_bodies import RequestBody, read_body
from components.inference.wire import MAX_MESSAGES, Name, check_arguments
from components.specs.wording import shortened

Messages = list[dict[str, Any]]


class Text(RequestBody):
    """A text part of a message. Fields that clients copy from responses are ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class ResponsesItem(RequestBody):
    """Fields common to all items."""

    id: str | None = None
    status: str | None = None


class MessageItem(ResponsesItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Text], Field(max_length=MAX_MESSAGES)]
    phase: None = None


class CallItem(ResponsesItem):
    """A function call."""

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str
    """Arguments as JSON text."""
    parsed_arguments: Any = None
    caller: None = None
    namespace: None = None


class OutputItem(ResponsesItem):
    """The output of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[Text], Field(max_length=MAX_MESSAGES)]
    name: str | None = None
    caller: None = None
    namespace: None = None


class ReasoningItem(ResponsesItem):
    """A reasoning item, which is discarded."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


_ITEMS: dict[str, type[ResponsesItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


def add_item(
    data: dict[str, Any], messages: Messages, path: str, sampled_arguments: Collection[str], problems: list[Problem]
) -> None:
    """Add an item to the conversation, or its problems to `problems`."""
    kind = data.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEMS:
        problems.append(
            Problem(f"{path}.type", f"{shortened(kind)} is not supported; expected one of {', '.join(_ITEMS)}")
        )
        return
    for name in ("content", "output"):
        for place, part in enumerate(data[name] if kind != "reasoning" and isinstance(data.get(name), list) else []):
            if isinstance(part, dict) and part.get("type") not in ("input_text", "output_text", "text"):
                text = f"{shortened(part.get('type'))} is not supported: this server reads text only"
                problems.append(Problem(f"{path}.{name}.{place}.type", text))
                return
    try:
        item = read_body(_ITEMS[kind], data, path)
    except SpecError as error:
        problems += error.problems
        return
    match item:
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content)})
        case CallItem():
            check_arguments(item.arguments, f"{path}.arguments", sampled_arguments, problems)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":  # text and calls of one response are one message
                last = messages.pop()
                messages.append({**last, "tool_calls": [*last.get("tool_calls", []), call]})
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        case OutputItem():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})


def _text(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
