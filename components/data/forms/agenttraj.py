"""Form `agenttraj`: conversations of AgentTraj, with `loss` in each message and the task in `item_id`."""

from __future__ import annotations

from collections.abc import Sequence

from components.data.columns import RowColumns
from components.data.examples import DataExample
from components.data.forms.base import Form, Records, conversation
from components.data.forms.sharegpt import SPEAKERS
from components.data.forms.writing import sharegpt_value, single
from components.data.messages import read_messages
from components.trajectories.groups import scenario_of
from components.trajectories.schema import Trajectory


def _read(columns: RowColumns) -> DataExample:
    name = columns.label("item_id") or columns.text("item_id")
    reward = columns.number("reward")
    messages = read_messages(columns.need("conversations"))
    world, _, number = name.rpartition("_")  # webshop_4545
    type_ = columns.label("type") or (world if number.isdecimal() else "")
    return DataExample([conversation(messages, 1.0 if reward is None else reward)], name=name, type=type_)


def _write(group: Sequence[Trajectory]) -> Records:
    for trajectory, messages in single(group):
        conversations = [
            {
                "from": SPEAKERS[message.role],
                "loss": message.trained if message.role == "assistant" else None,
                "value": sharegpt_value(message),
            }
            for message in messages
        ]
        tools = {"tools": trajectory.tools} if trajectory.tools else {}
        name = scenario_of(trajectory.scenario.id)
        yield {"item_id": name, "conversations": conversations, "reward": trajectory.reward, **tools}


FORM = Form(
    "agenttraj",
    "episodes of AgentTraj: conversations with from, loss and value, and item_id",
    {"conversations": ("conversations",), "item_id": ("item_id",)},
    _read,
    _write,
)
