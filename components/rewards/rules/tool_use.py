"""Efficiency of tool use.

    efficiency = min(n - w, m) / max(n, m)

n is the number of calls, w the number of wasted ones: repeated calls (the same tool, arguments and result as before)
and failed ones. m is the number of needed calls; if it is unknown, m = n - w, so efficiency is the share of calls that
were not wasted. It is 1 if exactly the needed calls were made, and lower for each wasted, superfluous or missing call.

Without any call, efficiency is 1 if none was needed (m = 0; if m is unknown: if the episode succeeded), else 0.
"""

from __future__ import annotations

import json
from typing import Any

from components.errors import JudgeError
from components.rewards.rules.answers import check_field, field, sampled_messages
from components.rewards.rules.patterns import Pattern
from components.specs.registered import registered
from components.trajectories.schema import History, Score, ToolCall, Trajectory


@registered("reward.tool_use")
class ToolUse:
    """Efficiency of the tool calls of an episode.

    Args:
        needed: Field of the episode with the needed calls (`components.rewards.rules.answers`), as a number or as a
            list of them; null if it is unknown.
        failed: Regular expression that matches the result of a failed call.

    Components: `calls`, `repeated`, `failed`. A repeated call that failed again counts in both, and is wasted once. A
    call without a result, such as the last one of an episode, has not failed.
    """

    def __init__(self, needed: str | None = None, failed: str = r"(?i)^\s*error\b"):
        if needed is not None:
            check_field(needed, "reward.needed")
        self.needed = needed
        self._failed = Pattern(failed, "reward.failed")

    def fields_read(self) -> dict[str, str]:
        """Return the fields of the episode that are read, by configuration key."""
        return {} if self.needed is None else {"needed": self.needed}

    def __call__(self, trajectory: Trajectory) -> Score:
        previous: set[tuple[str, str, str, str | None]] = set()
        calls = repeated = failed = wasted = 0
        for history, call, result in _calls(trajectory):
            signature = (history.agent, call.name, _canonical(call.arguments), result)
            repeat, error = signature in previous, result is not None and self._failed.search(result) is not None
            previous.add(signature)
            calls, repeated, failed = calls + 1, repeated + repeat, failed + error
            wasted += repeat or error
        useful = calls - wasted
        needed = useful if self.needed is None else _count(field(trajectory, self.needed), self.needed)
        most = max(calls, needed)
        efficiency = min(useful, needed) / most if most else float(self.needed is not None or trajectory.success)
        parts = {"calls": float(calls), "repeated": float(repeated), "failed": float(failed)}
        return Score(trajectory.id, efficiency, parts)


@registered("reward.calls")
class Calls:
    """Number of tool calls: a cost for `algorithm.costs`, or with a negative weight a penalty.

    Args:
        tools: Names of the tools that count, or a regular expression of the counted arguments (JSON) by name, null for
            all arguments: `{refund: null, send: '"to": ".*@'}`. null counts all tools.
        pattern: Regular expression of the calls that count, in the form `name {"argument": "value"}`; null counts all.
    """

    def __init__(self, tools: list[str] | dict[str, str | None] | None = None, pattern: str | None = None):
        self.tools = tools
        patterns = tools if isinstance(tools, dict) else {}
        self._arguments = {name: Pattern(text, f"reward.tools.{name}") for name, text in patterns.items() if text}
        self._pattern = None if pattern is None else Pattern(pattern)

    def __call__(self, trajectory: Trajectory) -> float:
        return float(sum(self._counts(call) for _, call, _ in _calls(trajectory)))

    def _counts(self, call: ToolCall) -> bool:
        if self.tools is not None and call.name not in self.tools:
            return False
        arguments = self._arguments.get(call.name)
        if arguments is not None and arguments.search(call.arguments) is None:
            return False
        return self._pattern is None or self._pattern.search(f"{call.name} {call.arguments}") is not None


def _calls(trajectory: Trajectory) -> list[tuple[History, ToolCall, str | None]]:
    """Return all calls, each once, with their results: the messages before the agent's next message."""
    calls = []
    for history, at in sampled_messages(trajectory):
        results: dict[str | None, str] = {}
        for message in history.messages[at + 1 :]:
            if message.role == "assistant":
                break
            results[message.tool_call_id] = message.content
        calls += [(history, call, results.get(call.id)) for call in history.messages[at].tool_calls]
    return calls


def _canonical(arguments: str) -> str:
    """Return the arguments in a canonical form."""
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
