"""Conversions of trajectories to what other tools train on: demonstrations (SFT) and pairs (preference).

Messages come out in OpenAI's JSON form, with `arguments` of a call as JSON text. These forms hold text, not tokens:
what trains on them tokenises again, so our own trainers take the trajectories themselves. Failed episodes never become
data.

Conversions are streams: they take any iterable of trajectories, such as `components.trajectories.store.read_scored`,
and yield record after record.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from components.trajectories.groups import adjacent_groups, have_spread
from components.trajectories.schema import Message, ToolCall, Trajectory

log = logging.getLogger(__name__)


def to_openai(message: Message) -> dict[str, Any]:
    """A message in OpenAI's form; keys that say nothing are left out."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def to_message(message: dict[str, Any]) -> Message:
    """The inverse of `to_openai`; span and finish reason are unknown."""
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    return Message(message["role"], message.get("content") or "", calls, message.get("tool_call_id"))


def conversations(trajectory: Trajectory) -> list[list[dict[str, Any]]]:
    """The different conversations of an episode, in order, each with at least one assistant message.

    A history that a later one of the same agent repeats and extends, as happens where the chat template rewrites the
    past, is the same conversation and appears once, at its full length. Sub-agents and compacted contexts stay apart.
    """
    shown = [(history.agent, [to_openai(message) for message in history.messages]) for history in trajectory.histories]
    return [
        messages
        for index, (agent, messages) in enumerate(shown)
        if any(message["role"] == "assistant" for message in messages)
        and not any(agent == other and longer[: len(messages)] == messages for other, longer in shown[index + 1 :])
    ]


def to_sft(trajectories: Iterable[Trajectory], min_reward: float | None = None) -> Iterator[dict[str, Any]]:
    """Demonstrations: one record for each conversation of each good episode.

    Good means a success of the environment, or, where `min_reward` is given, a reward of at least that.
    Yields `{"messages", "tools", "trajectory_id"}`, the form that TRL's SFTTrainer reads.
    """
    for trajectory in trajectories:
        if min_reward is None:
            good = trajectory.success
        else:
            good = trajectory.failure is None and trajectory.reward is not None and trajectory.reward >= min_reward
        if good:
            for messages in conversations(trajectory):
                yield {"messages": messages, "tools": trajectory.tools, "trajectory_id": trajectory.id}


def to_preference(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    """Pairs: the best episode of each scenario against its worst, by reward. Of equals, the first one is taken.

    The episodes of a scenario lie next to each other; ArtifactError where one comes back. Scenarios whose rewards are
    all equal (up to rounding) give no pair. Failed and unscored episodes are left out, and so are episodes of several
    conversations: one pair cannot say which of them was better.
    Yields `{"chosen", "rejected", "tools", "scenario_id", "score_chosen", "score_rejected"}`; `chosen` and `rejected`
    are whole conversations, of which TRL takes the shared beginning as the prompt.
    """
    several = 0
    for group in adjacent_groups(trajectories):
        candidates = []
        for trajectory in group:
            if trajectory.failure is not None or trajectory.reward is None:
                continue
            found = conversations(trajectory)
            if len(found) == 1:
                candidates.append((trajectory.reward, found[0], trajectory.tools))
            several += len(found) > 1
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
        log.warning("episodes left out of the preference pairs, for they hold several conversations: %d", several)


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> int:
    """Writes one record a line as ASCII JSON, one in memory at a time, and returns how many.

    The file appears under its name when it is complete. `datasets.load_dataset("json", data_files=...)` reads it.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    count = 0
    try:
        with part.open("w", encoding="ascii") as file:
            for record in records:
                file.write(json.dumps(record) + "\n")
                count += 1
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count
