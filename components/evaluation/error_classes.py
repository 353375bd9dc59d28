"""Classes of unsuccessful episodes: failures by boundary and kind, and wrong results by the way in which they ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from components.trajectories.schema import Trajectory

UNREADABLE = "no readable action"
"""No message of the episode could be parsed into an action."""
OUT_OF_TURNS = "out of turns"
"""The episode used all its turns."""
CUT_OFF = "message cut off"
"""The last message reached the token limit."""
WRONG = "wrong result"
"""The episode ended by itself, without success."""


@dataclass(frozen=True)
class ErrorClass:
    """Unsuccessful episodes of one kind."""

    name: str
    """One of the names above, or `BOUNDARY: KIND` of a failure."""
    episodes: Sequence[Trajectory]
    """Episodes of the class, in their order."""


def error_classes(trajectories: Sequence[Trajectory], max_turns: int) -> list[ErrorClass]:
    """Return the classes of the unsuccessful episodes, the largest first. max_turns: turn limit of an episode."""
    classes: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if not trajectory.success:
            classes.setdefault(_class_of(trajectory, max_turns), []).append(trajectory)
    return [ErrorClass(name, classes[name]) for name in sorted(classes, key=lambda name: (-len(classes[name]), name))]


def _class_of(trajectory: Trajectory, max_turns: int) -> str:
    if trajectory.failure is not None:
        return f"{trajectory.failure.boundary}: {trajectory.failure.kind}"
    turns = trajectory.metrics.get("turns", 0.0)
    if turns and trajectory.metrics.get("parse_errors") == turns:
        return UNREADABLE
    if turns >= max_turns:
        return OUT_OF_TURNS
    messages = [message for history in trajectory.histories for message in history.messages]
    answers = [message for message in messages if message.role == "assistant"]
    return CUT_OFF if answers and answers[-1].finish_reason == "length" else WRONG
