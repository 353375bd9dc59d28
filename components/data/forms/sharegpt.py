"""Form `sharegpt`: conversations of `from` and `value`."""

from __future__ import annotations

from collections.abc import Sequence

from components.data.columns import RowColumns
from components.data.examples import DataExample
from components.data.forms.base import Form, Records, conversation
from components.data.forms.writing import labels, sharegpt_value, single
from components.data.messages import read_messages
from components.trajectories.schema import Trajectory

SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}
"""Names of the roles in exported rows."""


def _read(columns: RowColumns) -> DataExample:
    reward = columns.number("reward")
    return DataExample([conversation(read_messages(columns.need("conversations")), 1.0 if reward is None else reward)])


def _write(group: Sequence[Trajectory]) -> Records:
    for trajectory, messages in single(group):
        shown = [
            {"from": SPEAKERS[message.role], "value": sharegpt_value(message)}
            | ({} if message.trained else {"loss": False})
            for message in messages
        ]
        yield {**labels(trajectory), "conversations": shown, "reward": trajectory.reward}


FORM = Form("sharegpt", "conversations of from and value", {"conversations": ("conversations",)}, _read, _write)
