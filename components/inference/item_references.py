"""References to items of stored responses, which clients send instead of the items.

Item ids contain the id of their response: `msg_NAME` is the text of `resp_NAME`, `fc_NAME_0` its first call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from components.errors import Problem, SpecError
from components.inference.request_bodies import RequestBody, read_body
from components.inference.response_items import Messages
from components.specs.wording import shortened

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
