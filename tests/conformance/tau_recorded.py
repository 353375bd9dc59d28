"""Replay of the recorded airline episodes: tool answers, gold databases and rewards, compared with the recorded ones.

The recordings are older than the published database: there, the state of a user's address has the name `province`. The
replay uses the published database with this one field renamed. The recorded digest of the database without any change
(that of a task whose gold actions change nothing) confirms that this is the only difference.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from components.environments.tau_bench import TauBench
from components.environments.tau_bench.database import Tables
from components.environments.tau_bench.user import SimulatedUser
from components.trajectories.schema import Scenario


class RecordedUser(SimulatedUser):
    """A user that repeats its recorded messages."""

    _replies: list[str] = PrivateAttr(default_factory=list)

    async def say(self, instruction: str, talk: list[list[str]], scenario: str) -> str:
        return self._replies[len(talk) - 1]


def renamed(tables: Tables) -> dict[str, Any]:
    """Return the tables with the name of a user's state in the recordings."""
    users = {
        key: {
            **user,
            "address": {("province" if name == "state" else name): text for name, text in user["address"].items()},
        }
        for key, user in tables["users"].items()
    }
    return {**tables, "users": users}


def published_digest(tables: Any) -> str:
    """Return the digest of a whole database as the recordings have it: SHA-256 of the text of nested tuples, the
    fields of an object in alphabetical order."""

    def nested(value: Any) -> Any:
        if isinstance(value, dict):
            return tuple((key, nested(value[key])) for key in sorted(value))
        return tuple(map(nested, value)) if isinstance(value, list) else value

    return hashlib.sha256(str(nested(tables)).encode()).hexdigest()


def replay_recorded(folder: str) -> dict[str, Any]:
    """Return counts and differences of the recorded airline episodes."""
    episodes = json.loads((Path(folder).expanduser() / "airline" / "recorded_gpt-4o.json").read_text())
    environment = TauBench(folder, "airline", train_share=0)
    environment.data = dataclasses.replace(environment.data, tables=renamed(environment.data.tables))
    environment.user = RecordedUser(url="http://127.0.0.1/v1", model="recorded")
    counts: Counter[str] = Counter(episodes=len(episodes))
    by_tool: dict[str, Counter[str]] = {}
    differences: list[dict[str, Any]] = []
    digests: dict[int, str] = {}
    for number, episode in enumerate(episodes):
        for at, name, ours, recorded in asyncio.run(_play(environment, number, episode)):
            tool = by_tool.setdefault(name, Counter())
            tool["calls"] += 1
            tool["equal"] += ours == recorded
            if ours != recorded:
                place = {"episode": number, "message": at, "tool": name}
                differences.append({**place, "recorded": recorded, "ours": ours})
        outcome = environment.outcome("")
        _compare(counts, differences, {"episode": number}, "reward", float(outcome["success"]), episode["reward"])
        info = (episode["info"]["reward_info"] or {}).get("info") or {}
        if "r_actions" in info:
            _compare(counts, differences, {"episode": number}, "database", outcome["state"], bool(info["r_actions"]))
        if "gt_data_hash" in info:
            task = episode["task_id"]
            digests[task] = digests.get(task) or published_digest(environment.gold().whole())
            _compare(counts, differences, {"episode": number}, "gold_digest", digests[task], info["gt_data_hash"])
    calls = {key: sum(tool[key] for tool in by_tool.values()) for key in ("calls", "equal")}
    return {
        **counts,
        **calls,
        "tools": {name: dict(tool) for name, tool in by_tool.items()},
        "differences": differences,
    }


def _compare(
    counts: Counter[str], differences: list[dict[str, Any]], place: dict[str, Any], kind: str, ours: Any, recorded: Any
) -> None:
    counts[f"{kind}s"] += 1
    counts[f"equal_{kind}s"] += ours == recorded
    if ours != recorded:
        differences.append({**place, "kind": kind, "recorded": recorded, "ours": ours})


async def _play(environment: TauBench, number: int, episode: dict[str, Any]) -> list[tuple[int, str, str, str]]:
    """Play the recorded actions; return the place, tool, our answer and the recorded answer of each call."""
    messages = episode["traj"]
    task = episode["info"]["task"]
    user = environment.user
    assert isinstance(user, RecordedUser)
    user._replies = [message["content"] for message in messages if message["role"] == "user"]
    await environment.reset(Scenario(f"recorded-{number}", {**task, "outputs": task["outputs"]}, "heldout"))
    answers = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        calls = (message.get("tool_calls") or [])[:1]
        step = environment.step({"role": "assistant", "content": message.get("content"), "tool_calls": calls})
        if not calls:
            await step
            continue
        answers.append((at, calls[0]["function"]["name"], step.observation[0]["content"], messages[at + 1]["content"]))
    return answers
