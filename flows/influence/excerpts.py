"""Texts of episodes, on one line."""

from __future__ import annotations

from components.trajectories.policy_text import text
from components.trajectories.schema import Trajectory

LONGEST = 160
"""Maximum number of characters of an excerpt."""


def excerpt(trajectory: Trajectory) -> str:
    """Return the beginning of the policy's messages, on one line."""
    shown = " / ".join(line for line in text(trajectory).split("\n") if line)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"
