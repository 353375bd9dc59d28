"""Conversion of trajectories to training data of other tools: demonstrations (SFT) and preference pairs.

Messages are in OpenAI's JSON format, with a call's `arguments` as JSON text. The records contain text, not tokens, so
their users tokenize again; Espalier's own trainers read the trajectories instead. Failed episodes are excluded.

Conversions are streams: they read any iterable of trajectories, such as `components.trajectories.store.read_scored`,
and yield records.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from components.trajectories.groups import adjacent_groups, have_spread
from components.trajectories.schema import History, Message, ToolCall, Trajectory

log = logging.getLogger(__name__)


def to_openai(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's format, without empty keys."""
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        data["reasoning"] = message.reasoning
    if message.tool_calls:
        data["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    return data


def openai_json(message: Message) -> dict[str, Any]:
    """Return a message as clients of OpenAI's format and other trainers read it: reasoning as `reasoning_content`."""
    data = to_openai(message)
    reasoning = data.pop("reasoning", None)
    return data if reasoning is None else {**data, "reasoning_content": reasoning}


def to_message(message: dict[str, Any]) -> Message:
    """Return a message from OpenAI's format, the inverse of `to_openai`, without span and finish reason."""
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    return Message(
        message["role"],
        message.get("content") or "",
        calls,
        message.get("tool_call_id"),
        reasoning=message.get("reasoning"),
    )


def conversations(trajectory: Trajectory) -> list[list[dict[str, Any]]]:
    """Return the distinct conversations of an episode, in order, each with at least one assistant message.

    If a later history of the same agent repeats and extends a history, because the chat template rewrites earlier
    messages, both are one conversation and only the longer one is returned. Sub-agents and compacted contexts are
    separate conversations.
    """
    return _conversations(trajectory.histories)


def _conversations(histories: Sequence[History]) -> list[list[dict[str, Any]]]:
    shown = [(history.agent, [openai_json(message) for message in history.messages]) for history in histories]
    return [
        messages
        for index, (agent, messages) in enumerate(shown)
        if any(message["role"] == "assistant" for message in messages)
        and not any(agent == other and longer[: len(messages)] == messages for other, longer in shown[index + 1 :])
    ]


def to_sft(trajectories: Iterable[Trajectory], min_reward: float | None = None) -> Iterator[dict[str, Any]]:
    """Yield demonstrations: one record per conversation of each successful episode.

    An episode is successful if the environment reports success or, with `min_reward`, if its reward is at least that.
    Records are `{"messages", "tools", "trajectory_id"}`, the format of TRL's SFTTrainer.
    """
    for trajectory in trajectories:
        if min_reward is None:
            good = trajectory.success
        else:
            good = trajectory.failure is None and trajectory.reward is not None and trajectory.reward >= min_reward
        if good:
            yield from _demonstrations(trajectory.histories, trajectory.tools, trajectory.id)


def read_sft(
    trajectories: Path, scores: Path, selection: Path | None = None, min_reward: float | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records of `to_sft` from files (`components.trajectories.store.read_scored`), by columns: successful
    episodes are selected before they are decoded, and their tokens are not read."""
    from components.trajectories.columns import EpisodeColumns
    from components.trajectories.decode import conversation_rows
    from components.trajectories.store import scored_batches
    from components.trajectories.tables import CONVERSATION_COLUMNS

    columns = ["failure.boundary", *(["outcome"] if min_reward is None else []), *CONVERSATION_COLUMNS]
    for batch in scored_batches(trajectories, scores, selection, columns=columns):
        episodes = EpisodeColumns(batch)
        if min_reward is None:
            good_N = episodes.success_N
        else:
            good_N = (episodes.reward_N >= min_reward) & ~episodes.failed_N
        for name, histories, tools in conversation_rows(episodes.where(good_N)):
            yield from _demonstrations(histories, tools, name)


def _demonstrations(
    histories: Sequence[History], tools: list[dict[str, Any]], trajectory_id: str
) -> Iterator[dict[str, Any]]:
    for messages in _conversations(histories):
        yield {"messages": messages, "tools": tools, "trajectory_id": trajectory_id}


def to_preference(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    """Yield preference pairs: the episodes of each scenario with the highest and the lowest reward. Ties are resolved
    by order.

    The episodes of a scenario must be adjacent; otherwise ArtifactError is raised. Scenarios with equal rewards (up to
    rounding) give no pair. Failed and unscored episodes are skipped, and so are episodes with several conversations: a
    pair cannot express a preference among them. Records are `{"chosen", "rejected", "tools", "scenario_id",
    "score_chosen", "score_rejected"}`; `chosen` and `rejected` are whole conversations, whose common prefix TRL uses as
    the prompt.
    """
    several = 0
    for group in adjacent_groups(trajectories):
        candidates = []
        for trajectory in group:
            if trajectory.failure is not None or trajectory.reward is None:
                continue
            episode_conversations = conversations(trajectory)
            if len(episode_conversations) == 1:
                candidates.append((trajectory.reward, episode_conversations[0], trajectory.tools))
            several += len(episode_conversations) > 1
        if not have_spread(reward for reward, _, _ in candidates):
            continue
        best = max(candidates, key=lambda candidate: candidate[0])
        worst = min(candidates, key=lambda candidate: candidate[0])
        yield {
            "chosen": best[1],
            "rejected": worst[1],
            "tools": best[2],
            "scenario_id": group[0].group,
            "score_chosen": best[0],
            "score_rejected": worst[0],
        }
    if several:
        log.warning("episodes left out of the preference pairs because they have several conversations: %d", several)


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> int:
    """Write one record per line as ASCII JSON, with one in memory at a time, and return their number.

    Records that follow each other with the same list of tools, one object, share its text.
    The file is written atomically. `datasets.load_dataset("json", data_files=...)` reads it.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    encode = json.JSONEncoder().encode
    count = 0
    tools: Any = None
    tools_text = ""
    try:
        with part.open("w", encoding="ascii") as file:
            for record in records:
                if (own := record.get("tools")) is not None and own is not tools:
                    tools, tools_text = own, encode(own)
                values = (tools_text if value is tools else encode(value) for value in record.values())
                fields = (f"{encode(key)}: {value}" for key, value in zip(record, values, strict=True))
                file.write(f"{{{', '.join(fields)}}}\n")
                count += 1
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count
