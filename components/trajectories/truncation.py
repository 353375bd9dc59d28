"""Truncation: limits that end an episode before its environment does, and limits that cut a message.

A truncated episode is data, not a failure. It has the metric of its limit, is unsuccessful, is scored as it stands, and
counts in every mean. A message that is cut off is an action like any other: the environment decides on its success.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from components.trajectories.schema import Trajectory

CONTEXT = "truncated_by_context"
"""Metric of an episode whose next prompt did not fit the context."""
TURNS = "truncated_by_turns"
"""Metric of an episode that used all its turns."""
CALLS = "truncated_by_calls"
"""Metric of a custom agent's episode whose last call exceeded the number of calls."""
MESSAGES = "truncated"
"""Metric of an episode: number of its messages that were cut off, at `agent.max_tokens` or the end of the context."""
KEYS = {CONTEXT: "model.max_length", TURNS: "agent.max_turns", CALLS: "agent.max_turns", MESSAGES: "agent.max_tokens"}
"""Key that sets each limit."""
LIMITS = (CONTEXT, TURNS, CALLS)
"""Limits that end an episode."""


def truncated_at(trajectory: Trajectory, limit: str) -> Trajectory:
    """Return a trajectory that a limit ended. The success that an environment states before its end does not count."""
    outcome = trajectory.outcome | ({"success": False} if "success" in trajectory.outcome else {})
    return replace(trajectory, outcome=outcome, metrics=trajectory.metrics | {limit: 1.0})


def is_truncated(trajectory: Trajectory) -> bool:
    """Return True if a limit ended the episode or cut one of its messages."""
    cut = any(message.finish_reason == "length" for history in trajectory.histories for message in history.messages)
    return cut or any(trajectory.metrics.get(limit) for limit in LIMITS)


def acted_to_the_end(metrics: Mapping[str, float]) -> bool:
    """Return True if an episode with these metrics has an action that was read, and no limit ended it."""
    return metrics.get("parse_errors", math.nan) != metrics.get("turns") and not any(name in metrics for name in LIMITS)


def limit_texts(metrics: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Return the limits that shaped the episodes of a stage, from its metrics: the share that each concerns, and a
    sentence with the key to raise."""
    finished = round(metrics.get("episodes", 0.0) - metrics.get("failed", 0.0))
    texts = {}
    for limit in LIMITS:
        if share := metrics.get(limit, 0.0):
            reason = limit.rpartition("_")[2]
            texts[limit] = (
                share,
                f"{round(share * finished)} of {finished} episodes by the limit of {reason}, without success; raise "
                f"{KEYS[limit]}",
            )
    if metrics.get(MESSAGES) and metrics.get("turns"):
        share = metrics[MESSAGES] / metrics["turns"]
        texts[MESSAGES] = (share, f"{share:.1%} of the answers were cut off; raise {KEYS[MESSAGES]}")
    return texts
