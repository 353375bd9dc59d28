"""Form `thumbs`: an answer to a prompt, or a conversation, with a label: good or bad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.data.columns import RowColumns
from components.data.examples import DataExample, RowProblem
from components.data.forms.base import Form, Records, completion_messages, conversation, prompt_messages
from components.data.forms.writing import labels, plain_or_messages, prompt_length, single
from components.data.messages import read_messages
from components.trajectories.schema import Trajectory

GOOD_FROM = 0.5
"""Reward from which an exported answer is good."""
_GOOD = "true 1 1.0 +1 yes y up good positive correct right accepted accept approved like liked helpful pass passed 👍"
_BAD = "false 0 0.0 -1 -1.0 no n down bad negative incorrect wrong rejected reject dislike disliked unhelpful failed 👎"
LABELS = {**dict.fromkeys(_GOOD.split(), True), **dict.fromkeys(_BAD.split(), False)}
"""Labels as text, in lower case, and whether the answer is good."""
LABEL_COLUMNS = (
    *("label", "thumb", "thumbs", "thumbs_up", "is_good", "good", "is_correct", "correct", "is_accepted", "accepted"),
    *("is_helpful", "helpful", "is_positive", "liked", "like", "upvoted", "vote", "feedback", "rating", "passed"),
)
"""Common names of the column with the label, in order of preference."""


def _read(columns: RowColumns) -> DataExample:
    good = _label(columns.need("label"))
    if columns.get("messages") is not None:
        messages = read_messages(columns.get("messages"))
    else:
        messages = [*prompt_messages(columns.need("prompt")), *completion_messages(columns.need("completion"))]
    return DataExample([conversation(messages, float(good))])


def _label(value: Any) -> bool:
    good = LABELS.get(str(value).strip().lower())
    if good is None:
        raise RowProblem(f"label {value!r:.40}: expected true or false, 1 or 0, up or down, good or bad")
    return good


def _write(group: Sequence[Trajectory]) -> Records:
    for trajectory, messages in single(group):
        cut = prompt_length(messages)
        yield {
            **labels(trajectory),
            "prompt": plain_or_messages(messages[:cut], "user"),
            "completion": plain_or_messages(messages[cut:], "assistant"),
            "label": (trajectory.reward or 0.0) >= GOOD_FROM,
        }


FORM = Form(
    "thumbs",
    "an answer to a prompt, or a conversation, with a label: good or bad",
    {"label": LABEL_COLUMNS},
    _read,
    _write,
    {
        "prompt": ("prompt", "question", "instruction", "query"),
        "completion": ("completion", "response", "output", "answer"),
        "messages": ("messages", "conversations", "conversation", "dialogue"),
    },
)
