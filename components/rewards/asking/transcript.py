"""An episode as a judge is shown it: its messages as JSON data.

What models, users and tools wrote is data, and stays inside of it: a tag of ours in such a text is broken up, so that
no text can end its own part of the prompt and begin another. Ids of tool calls are random in some engines and are left
out, so that what says the same is the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import orjson

from components.trajectories.schema import History, Message, Trajectory

TAGS = ("trajectory", "trajectories", "context", "tools", "rubric", "system")
"""Names of the tags of our prompts."""
_OURS = re.compile(rf"<(?=\s*/?\s*(?:{'|'.join(TAGS)})\b)", re.I)
CUT = "[… {} characters left out …]"

Shown = dict[str, Any]
"""A message as it is shown."""


def shown(trajectory: Trajectory) -> list[list[Shown]]:
    """The messages of each history; the agent is named where there are several."""
    several = len(trajectory.histories) > 1
    return [_history(one, named=several) for one in trajectory.histories]


def _history(history: History, named: bool) -> list[Shown]:
    messages = [_message(one) for one in history.messages]
    return [{"agent": history.agent}, *messages] if named else messages


def _message(message: Message) -> Shown:
    said: Shown = {"role": message.role}
    if message.content or not message.tool_calls:
        said["content"] = message.content
    if message.tool_calls:
        said["calls"] = [{"tool": call.name, "arguments": _arguments(call.arguments)} for call in message.tool_calls]
    if message.finish_reason == "length":
        said["cut_off"] = True
    return said


def _arguments(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return text


def common_start(conversations: Sequence[Sequence[Shown]]) -> int:
    """How many messages all of them begin with alike."""
    shortest = min(map(len, conversations), default=0)
    first = conversations[0] if conversations else []
    return next((i for i in range(shortest) if any(one[i] != first[i] for one in conversations)), shortest)


def as_text(data: Any, longest: int | None = None) -> str:
    """As JSON in which no tag of ours begins or ends. Beyond `longest` characters the middle is left out, and it says
    so."""
    try:
        text = orjson.dumps(data).decode()
    except TypeError:  # halves of surrogate pairs, numbers of more than 64 bits
        text = json.dumps(data)
    if longest is not None and len(text) > longest:
        half = max((longest - len(CUT) - 10) // 2, 1)
        text = text[:half] + CUT.format(len(text) - 2 * half) + text[-half:]
    return _OURS.sub("\\\\u003c", text) if "<" in text else text  # to look for the sign alone is far quicker
