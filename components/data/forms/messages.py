"""Form `messages`: conversations in OpenAI's format, with tools and calls."""

from __future__ import annotations

from collections.abc import Sequence

from components.data.columns import RowColumns
from components.data.examples import DataExample
from components.data.forms.base import Form, Records, conversation
from components.data.forms.writing import labels, openai_messages, single
from components.data.messages import read_messages
from components.trajectories.schema import Trajectory


def _read(columns: RowColumns) -> DataExample:
    reward = columns.number("reward")
    return DataExample([conversation(read_messages(columns.need("messages")), 1.0 if reward is None else reward)])


def _write(group: Sequence[Trajectory]) -> Records:
    for trajectory, messages in single(group):
        yield {**labels(trajectory), "messages": openai_messages(messages), "reward": trajectory.reward}


FORM = Form(
    "messages",
    "conversations in OpenAI's format, with tools and calls",
    {"messages": ("messages", "conversation", "dialogue")},
    _read,
    _write,
)
