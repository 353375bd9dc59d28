"""How well an episode used its tools.

    efficiency = min(n - w, m) / max(n, m)        1 where n = m = 0

n calls, of which w were wasted: repeated (the same tool with the same arguments as before, and the same answer) or
failed. m is how many are needed; where nobody knows, all calls that were not wasted are: m = n - w, so efficiency is
the share of calls that were not wasted. It is 1 where the needed calls were made and no other, and less for each that
was wasted, too many, or left out.
"""

from __future__ import annotations

import json
from typing import Any

from components.errors import JudgeError
from components.rewards.rules.answers import check_field, field, spoken
from components.rewards.rules.patterns import Pattern
from components.specs.registered import registered
from components.trajectories.schema import History, Score, ToolCall, Trajectory


@registered("reward.tool_use")
class ToolUse:
    """Efficiency of the calls of an episode.

    Args:
        needed: Field of the episode that says how many calls are needed (`components.rewards.rules.answers`), as a
            number or as a list of them; null where nobody knows.
        failed: Regular expression of an answer to a call that failed.

    Components: `calls`, `repeated`, `failed`. A call that was repeated and failed again is counted in both, and wasted
    once. A call without an answer, as the last one of an episode that is over may be, has not failed.
    """

    def __init__(self, needed: str | None = None, failed: str = r"(?i)^\s*error\b"):
        if needed is not None:
            check_field(needed, "reward.needed")
        self.needed = needed
        self._failed = Pattern(failed, "reward.failed")

    def fields_read(self) -> dict[str, str]:
        """Fields of the episode that are read, by key."""
        return {} if self.needed is None else {"needed": self.needed}

    def __call__(self, trajectory: Trajectory) -> Score:
        seen: set[tuple[str, str, str, str | None]] = set()
        calls = repeated = failed = wasted = 0
        for history, call, answer in _calls(trajectory):
            same = (history.agent, call.name, _plain(call.arguments), answer)
            again, broken = same in seen, answer is not None and self._failed.search(answer) is not None
            seen.add(same)
            calls, repeated, failed = calls + 1, repeated + again, failed + broken
            wasted += again or broken
        useful = calls - wasted
        needed = useful if self.needed is None else _count(field(trajectory, self.needed), self.needed)
        most = max(calls, needed)
        efficiency = min(useful, needed) / most if most else 1.0
        parts = {"calls": float(calls), "repeated": float(repeated), "failed": float(failed)}
        return Score(trajectory.id, efficiency, parts)


@registered("reward.calls")
class Calls:
    """How many calls of tools there were: a cost for `algorithm.costs`, or with a weight below 0 a penalty.

    Args:
        tools: Names of the tools that count; null counts all.
        pattern: Regular expression of the calls that count, written `name {"argument": "value"}`; null counts all.
    """

    def __init__(self, tools: list[str] | None = None, pattern: str | None = None):
        self.tools = tools
        self._pattern = None if pattern is None else Pattern(pattern)

    def __call__(self, trajectory: Trajectory) -> float:
        calls = [call for _, call, _ in _calls(trajectory) if self.tools is None or call.name in self.tools]
        if self._pattern is None:
            return float(len(calls))
        return float(sum(self._pattern.search(f"{call.name} {call.arguments}") is not None for call in calls))


def _calls(trajectory: Trajectory) -> list[tuple[History, ToolCall, str | None]]:
    """All calls, each once, with their answers: those that come before the next message of the agent."""
    found = []
    for history, at in spoken(trajectory):
        answers: dict[str | None, str] = {}
        for message in history.messages[at + 1 :]:
            if message.role == "assistant":
                break
            answers[message.tool_call_id] = message.content
        found += [(history, call, answers.get(call.id)) for call in history.messages[at].tool_calls]
    return found


def _plain(arguments: str) -> str:
    """Arguments in one spelling."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _count(value: Any, name: str) -> float:
    if isinstance(value, list):
        return float(len(value))
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    raise JudgeError(f"{name} is {value!r:.100}, expected a number of calls or a list of them")
