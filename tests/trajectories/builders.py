"""Builders of trajectories for tests."""

from __future__ import annotations

from typing import Any

from components.trajectories.schema import Failure, History, Message, Scenario, ToolCall, Trajectory

FAILURE = Failure("environment", "EnvironmentFailed", "step: ValueError: no such order")
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def scenario(name: str, *, type: str = "refund", difficulty: int = 1) -> Scenario:
    return Scenario(name, {"order": name}, "train", type, difficulty)


def talk(*texts: str, agent: str = "main") -> History:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    return History([Message(roles[i % 2], text) for i, text in enumerate(texts)], agent=agent)


def tool_talk() -> History:
    """A call, its answer, and the last word."""
    call = ToolCall("call_0", "look_up", '{"id": "A7"}')
    return History(
        [
            Message("system", "You serve customers."),
            Message("user", "Where is A7?"),
            Message("assistant", "", [call]),
            Message("tool", "shipped", tool_call_id="call_0"),
            Message("assistant", "It is on its way."),
        ]
    )


def episode(
    name: str = "s",
    sample: int = 0,
    *,
    reward: float | None = None,
    success: bool | None = None,
    failure: Failure | None = None,
    histories: list[History] | None = None,
    outcome: dict[str, Any] | None = None,
    turns: float | None = 2.0,
    type: str = "refund",
    difficulty: int = 1,
) -> Trajectory:
    if outcome is None:
        outcome = {} if success is None else {"success": success}
    return Trajectory(
        id=f"{name}/{sample}",
        scenario=scenario(name, type=type, difficulty=difficulty),
        sample=sample,
        histories=[talk("Hello.", f"Answer {sample}.")] if histories is None else histories,
        tools=TOOLS,
        outcome=outcome,
        metrics={} if turns is None else {"turns": turns},
        failure=failure,
        policy="base",
        reward=reward,
    )
