"""Pages of the commands on influence, and the texts of episodes in them."""

from __future__ import annotations

from pathlib import Path

from components.errors import ResourceError
from components.trajectories.policy_text import text
from components.trajectories.schema import Trajectory

LONGEST = 160
"""Maximum number of characters of an excerpt."""


def write_page(path: Path, html: str) -> Path:
    """Write a page and return its absolute path. Raises ResourceError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}; give another file: --html FILE") from None
    return path.absolute()


def excerpt(trajectory: Trajectory) -> str:
    """Return the beginning of the policy's messages, on one line."""
    shown = " / ".join(line for line in text(trajectory).split("\n") if line)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"
