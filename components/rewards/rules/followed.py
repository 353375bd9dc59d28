"""Execution of the sub-goals of a planner by its workers.

    R = sub-goals carried out / sub-goals

A worker's history begins with its sub-goal, the first user message. The worker carried it out if it called a tool, and
if each call is of a tool that the episode offers and has arguments whose values all stand in the sub-goal. A call
without arguments counts only of a tool without parameters whose name stands in the sub-goal. Whether the sub-goal was
wise is the planner's matter, so the result of a call does not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from components.errors import JudgeError
from components.rewards.rules.answers import sampled_messages
from components.specs.registered import registered
from components.trajectories.roles import WORKER
from components.trajectories.schema import Score, ToolCall, Trajectory


@registered("reward.followed")
class Followed:
    """Share of the sub-goals that the workers carried out.

    Args:
        role: Name of the agents that receive sub-goals.

    Components: `subgoals`. An episode without a sub-goal is unscored. Calls are read from the messages' tool calls
    (`agent.format=native`).
    """

    def __init__(self, role: str = WORKER):
        self.role = role

    def __call__(self, trajectory: Trajectory) -> Score:
        calls: dict[int, list[ToolCall]] = {}
        for history, at in sampled_messages(trajectory):
            if history.agent == self.role:
                calls.setdefault(id(history), []).extend(history.messages[at].tool_calls)
        workers = [history for history in trajectory.histories if id(history) in calls]
        if not workers:
            raise JudgeError(f"the episode has no turn of the role {self.role!r}, which receives the sub-goals")
        tools = {tool["function"]["name"]: tool["function"] for tool in trajectory.tools}
        followed = 0
        for history in workers:
            subgoal = next((message.content for message in history.messages if message.role == "user"), "")
            own = calls[id(history)]
            followed += bool(own) and all(_is_named(call, subgoal, tools) for call in own)
        return Score(trajectory.id, followed / len(workers), {"subgoals": float(len(workers))})


def _is_named(call: ToolCall, subgoal: str, tools: Mapping[str, Any]) -> bool:
    """Return True if the sub-goal contains the values of all arguments of a call of a tool, as whole words; without
    arguments, the name of a tool that takes none."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return False
    if call.name not in tools or not isinstance(arguments, dict):
        return False
    if not arguments:
        return not tools[call.name].get("parameters", {}).get("properties") and _stands_in(call.name, subgoal)
    return all(_stands_in(value, subgoal) for value in arguments.values())


def _stands_in(value: Any, text: str) -> bool:
    written = value if isinstance(value, str) else json.dumps(value)
    return bool(written.strip()) and re.search(rf"(?<!\w){re.escape(written.strip())}(?!\w)", text) is not None
