"""Parts of exported rows that several forms share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from components.trajectories.convert import openai_json, to_openai
from components.trajectories.groups import scenario_of
from components.trajectories.reasoning import with_reasoning
from components.trajectories.schema import History, Message, Trajectory


def single(group: Sequence[Trajectory]) -> Iterator[tuple[Trajectory, list[Message]]]:
    """Yield the finished, scored trajectories that are one conversation, with its messages. A form of conversations
    cannot express an episode with several histories that do not extend each other."""
    for trajectory in group:
        messages = only_conversation(trajectory)
        if trajectory.failure is None and trajectory.reward is not None and messages:
            yield trajectory, messages


def only_conversation(trajectory: Trajectory) -> list[Message]:
    """Return the messages of the longest history if every other history of the same agent is its beginning; else
    none."""
    histories = trajectory.histories
    if not histories:
        return []
    longest: History = max(histories, key=lambda history: len(history.messages))
    shown = [to_openai(message) for message in longest.messages]
    for history in histories:
        if history.agent != longest.agent:
            return []
        if [to_openai(message) for message in history.messages] != shown[: len(history.messages)]:
            return []
    return list(longest.messages)


def openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's format; `weight` 0 marks a message that is not trained on."""
    return [openai_json(message) | ({} if message.trained else {"weight": 0}) for message in messages]


def labels(trajectory: Trajectory) -> dict[str, Any]:
    """Return the columns that describe the task: id, type, difficulty and tools, as far as they are set."""
    scenario = trajectory.scenario
    columns: dict[str, Any] = {"id": scenario_of(scenario.id)}
    if scenario.type:
        columns["type"] = scenario.type
    if scenario.difficulty:
        columns["difficulty"] = scenario.difficulty
    return columns | ({"tools": trajectory.tools} if trajectory.tools else {})


def prompt_length(messages: Sequence[Message]) -> int:
    """Return the number of messages before the first trained one."""
    for index, message in enumerate(messages):
        if message.role == "assistant" and message.trained:
            return index
    return len(messages)


def shared_length(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Return the number of messages with which both conversations begin."""
    count = 0
    for one_message, other_message in zip(first, second, strict=False):
        if to_openai(one_message) != to_openai(other_message):
            break
        count += 1
    return count


def plain_or_messages(messages: Sequence[Message], role: str) -> Any:
    """Return the text of one message of this role without calls and reasoning, or a list of messages."""
    message = messages[0] if len(messages) == 1 and messages[0].role == role else None
    if message is not None and not message.tool_calls and message.reasoning is None:
        return message.content
    return openai_messages(messages)


def sharegpt_value(message: Message) -> str:
    """Return the text of a message with its reasoning and its calls, tagged."""
    calls = [
        f'<tool_call>{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}</tool_call>'
        for call in message.tool_calls
    ]
    return with_reasoning(message, message.content + "".join(calls))
