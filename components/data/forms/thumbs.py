"""Form `thumbs`: a prompt, an answer, and whether it is good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.data.columns import RowColumns
from components.data.examples import DataExample, RowProblem
from components.data.forms.base import Form, Records, completion_messages, conversation, prompt_messages
from components.data.forms.writing import labels, plain_or_messages, prompt_length, single
from components.trajectories.schema import Trajectory

GOOD_FROM = 0.5
"""Reward from which an exported answer is good."""
_LABELS = {
    "true": True,
    "1": True,
    "1.0": True,
    "up": True,
    "good": True,
    "false": False,
    "0": False,
    "0.0": False,
    "-1": False,
    "-1.0": False,
    "down": False,
    "bad": False,
}


def _read(columns: RowColumns) -> DataExample:
    good = _label(columns.need("label"))
    messages = [*prompt_messages(columns.need("prompt")), *completion_messages(columns.need("completion"))]
    return DataExample([conversation(messages, float(good))])


def _label(value: Any) -> bool:
    good = _LABELS.get(str(value).strip().lower())
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
    "a prompt, an answer, and a label: good or bad",
    {
        "prompt": ("prompt", "question", "instruction"),
        "completion": ("completion", "response", "output"),
        "label": ("label", "thumb", "thumbs"),
    },
    _read,
    _write,
)
