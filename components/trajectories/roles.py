"""Roles of an episode: the agents that its histories name, such as a planner and a worker."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from components.trajectories.schema import History, Trajectory

PLANNER, WORKER = "planner", "worker"
"""Roles of `agent.roles`."""
MAIN = "main"
"""Only role of the agent loop without `agent.roles`."""


def role_names(trajectory: Trajectory) -> list[str]:
    """Return the roles of an episode, each once, in the order of its histories."""
    return list(dict.fromkeys(history.agent for history in trajectory.histories))


def role_turns(trajectory: Trajectory) -> list[str]:
    """Return the role of each turn, in the order of the step rewards: of each sampled message or, in a history without
    tokens, of each assistant message."""
    return [history.agent for history in trajectory.histories for _ in range(_turns(history))]


def restrict(trajectory: Trajectory, roles: Collection[str]) -> Trajectory:
    """Return the trajectory with the histories of these roles and their step rewards. Step rewards that do not match
    the turns are left out."""
    turns = role_turns(trajectory)
    rewards = trajectory.step_rewards if len(trajectory.step_rewards) == len(turns) else []
    return replace(
        trajectory,
        histories=[history for history in trajectory.histories if history.agent in roles],
        step_rewards=[reward for reward, role in zip(rewards, turns, strict=False) if role in roles],
    )


def by_role(trajectory: Trajectory, values: Sequence[float]) -> dict[str, list[float]]:
    """Return the values of the turns by role; one for each turn, in the order of `role_turns`."""
    remaining = iter(values)
    result: dict[str, list[float]] = {}
    for history in trajectory.histories:
        result.setdefault(history.agent, []).extend(islice(remaining, _turns(history)))
    return result


def tools_of(trajectory: Trajectory, history: History) -> list[dict[str, Any]]:
    """Return the tools that the agent of a history reads: a planner calls none, because its workers do."""
    return [] if history.agent == PLANNER else trajectory.tools


def _turns(history: History) -> int:
    if history.token_ids:
        return sum(message.span is not None for message in history.messages)
    return sum(message.role == "assistant" for message in history.messages)
