"""Forms of whole conversations.

messages     OpenAI's format, with tools and calls
sharegpt     `from` and `value`
agenttraj    AgentTraj, with `loss` in each message and the task in `item_id`
"""

from __future__ import annotations

from collections.abc import Sequence

from components.data.columns import RowColumns
from components.data.examples import DataExample
from components.data.forms.base import Form, Records, conversation, world
from components.data.forms.writing import labels, openai_messages, sharegpt_value, single
from components.data.messages import read_messages
from components.trajectories.groups import scenario_of
from components.trajectories.schema import Trajectory


def _read_messages(columns: RowColumns) -> DataExample:
    reward = columns.number("reward")
    return DataExample([conversation(read_messages(columns.need("messages")), 1.0 if reward is None else reward)])


def _write_messages(group: Sequence[Trajectory]) -> Records:
    for trajectory, messages in single(group):
        yield {**labels(trajectory), "messages": openai_messages(messages), "reward": trajectory.reward}


MESSAGES = Form(
    "messages",
    "conversations in OpenAI's format, with tools and calls",
    {"messages": ("messages", "conversation", "dialogue")},
    _read_messages,
    _write_messages,
)


SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}
"""Names of the roles in exported rows."""


def _read_sharegpt(columns: RowColumns) -> DataExample:
    reward = columns.number("reward")
    return DataExample([conversation(read_messages(columns.need("conversations")), 1.0 if reward is None else reward)])


def _write_sharegpt(group: Sequence[Trajectory]) -> Records:
    for trajectory, messages in single(group):
        shown = [
            {"from": SPEAKERS[message.role], "value": sharegpt_value(message)}
            | ({} if message.trained else {"loss": False})
            for message in messages
        ]
        yield {**labels(trajectory), "conversations": shown, "reward": trajectory.reward}


SHAREGPT = Form(
    "sharegpt",
    "conversations of from and value",
    {"conversations": ("conversations",)},
    _read_sharegpt,
    _write_sharegpt,
)


def _read_agenttraj(columns: RowColumns) -> DataExample:
    name = columns.label("item_id") or columns.text("item_id")
    reward = columns.number("reward")
    messages = read_messages(columns.need("conversations"))
    type_ = columns.label("type") or world(name)
    return DataExample([conversation(messages, 1.0 if reward is None else reward)], name=name, type=type_)


def _write_agenttraj(group: Sequence[Trajectory]) -> Records:
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


AGENTTRAJ = Form(
    "agenttraj",
    "episodes of AgentTraj: conversations with from, loss and value, and item_id",
    {"conversations": ("conversations",), "item_id": ("item_id",)},
    _read_agenttraj,
    _write_agenttraj,
)
