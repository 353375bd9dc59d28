"""Items of a Responses conversation as messages of the engine protocol.

Messages, function calls and function call outputs are separate items. Text and calls of one response are merged into
one assistant message. Reasoning items are discarded.

Clients may send references to items of stored responses instead of the items. Item ids contain the id of their
response: `msg_NAME` is the text of `resp_NAME`, `fc_NAME_0` its first call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
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


_ID = re.compile(r"msg_(?P<text>\w+)|fc_(?P<call>\w+)_(?P<index>\d{1,4})")


class ItemReference(RequestBody):
    """A reference to an item of a response that the server stored."""

    type: Literal["item_reference"]
    id: str


def resolve(
    items: list[dict[str, Any]], earlier: Callable[[str], Messages] | None, problems: list[Problem]
) -> list[dict[str, Any]]:
    """Return the items with the stored items in the place of references. earlier: as in `responses.read_request`.

    A reference that cannot be resolved adds its problem, and keeps its place as an item without content.
    """
    resolved: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if item.get("type") != "item_reference":
            resolved.append(item)
            continue
        try:
            resolved.append(_referenced(item, f"input.{index}", earlier))
        except SpecError as error:
            problems += error.problems
            resolved.append({"type": "reasoning"})
    return resolved


def _referenced(item: dict[str, Any], path: str, earlier: Callable[[str], Messages] | None) -> dict[str, Any]:
    """Return the stored item. Raises SpecError."""
    name = read_body(ItemReference, item, path).id
    if earlier is None:
        raise SpecError([Problem(f"{path}.type", "this server stores no responses; send the item itself")])
    if (stored := _stored_item(name, earlier)) is None:
        text = f"{shortened(name)}: no stored response has this item; send the item itself"
        raise SpecError([Problem(f"{path}.id", text)])
    return stored


def _stored_item(name: str, earlier: Callable[[str], Messages]) -> dict[str, Any] | None:
    """Return an item by its id; None if there is none."""
    match = _ID.fullmatch(name)
    if match is None:
        return None
    try:
        message = earlier(f"resp_{match['text'] or match['call']}")[-1]
    except SpecError:
        return None
    if match["text"]:
        return {"type": "message", "role": "assistant", "content": message.get("content") or ""}
    calls = message.get("tool_calls") or []
    index = int(match["index"])
    if index >= len(calls):
        return None
    call = calls[index]
    return {"type": "function_call", "call_id": call["id"], **call["function"]}
