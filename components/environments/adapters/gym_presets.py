"""Descriptions, names of actions and text observations of known Gymnasium environments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from components.environments.optional_packages import import_optional

Goal = float | Literal["terminated", "truncated"]


@dataclass(frozen=True)
class View:
    """Argument of a `render` function."""

    observation: Any
    environment: Any


@dataclass(frozen=True)
class Preset:
    """Defaults for an environment."""

    about: str
    actions: tuple[str, ...]
    success: Goal
    render: Callable[[View], str]


def general(view: View) -> str:
    """Render numbers, arrays, mappings and text, for environments without a dedicated renderer."""
    return _readable(view.observation)


def _readable(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_readable(item)}" for name, item in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(_readable(item) for item in value)
    array = import_optional("numpy", "gym").asarray(value)
    if array.ndim == 0:
        number = array.item()
        return f"{number:.4g}" if isinstance(number, float) else str(number)
    if array.ndim == 1:
        return " ".join(_readable(item) for item in array[:500])
    return "\n".join(_readable(row) for row in array[:100]) + "\n" * (array.ndim - 2)


def _grid(rows: Sequence[str], state: int) -> str:
    """Return the grid with the agent marked as A."""
    row, column = divmod(int(state), len(rows[0]))
    marked = [list(line) for line in rows]
    marked[row][column] = "A"
    drawn = "\n".join("".join(line) for line in marked)
    return f"{drawn}\nYou are in row {row + 1}, column {column + 1}."


def _lake(view: View) -> str:
    return _grid([b"".join(row).decode() for row in view.environment.unwrapped.desc], view.observation)


def _cliff(view: View) -> str:
    return _grid(["." * 12] * 3 + ["S" + "C" * 10 + "G"], view.observation)


def _taxi(view: View) -> str:
    row, column, passenger, goal = view.environment.unwrapped.decode(int(view.observation))
    places = [
        f"{name} (row {at[0] + 1}, column {at[1] + 1})"
        for name, at in zip(("Red", "Green", "Yellow", "Blue"), view.environment.unwrapped.locs, strict=True)
    ]
    rows = "\n".join(b"".join(line).decode() for line in view.environment.unwrapped.desc)
    where = "in the taxi" if passenger == 4 else f"at {places[passenger]}"
    return (
        f"{rows}\nThe taxi is in row {row + 1}, column {column + 1}. The passenger is {where} and wants to "
        f"{places[goal]}."
    )


def _cards(view: View) -> str:
    total, dealer, ace = (int(value) for value in view.observation)
    shown = "an ace" if dealer == 1 else dealer
    return f"Your cards sum to {total}{' with an ace as 11' if ace else ''}. The dealer shows {shown}."


def _pole(view: View) -> str:
    place, speed, angle, turning = (float(value) for value in view.observation)
    return (
        f"Cart at {place:+.2f} (ends at 2.4), moving {speed:+.2f}. "
        f"Pole at {math.degrees(angle):+.1f} degrees (falls at 12), turning {math.degrees(turning):+.0f} a second. "
        "Plus is right."
    )


PRESETS: dict[str, Preset] = {
    "FrozenLake": Preset(
        "Cross the lake from S to G (A is you, F is ice, H is a hole: falling in ends it).",
        ("left", "down", "right", "up"),
        1.0,
        _lake,
    ),
    "CliffWalking": Preset(
        "Walk from S to G (A is you). C is a cliff: stepping there costs 100 and takes you back to S.",
        ("up", "right", "down", "left"),
        "terminated",
        _cliff,
    ),
    "Taxi": Preset(
        "Drive the taxi to the passenger, pick up, drive to where the passenger wants, drop off. | is a wall, : none.",
        ("south", "north", "east", "west", "pick up", "drop off"),
        "terminated",
        _taxi,
    ),
    "Blackjack": Preset(
        "Play blackjack: come closer to 21 than the dealer, and not above.", ("stick", "hit"), 1.0, _cards
    ),
    "CartPole": Preset("Keep the pole upright by pushing the cart.", ("push left", "push right"), "truncated", _pole),
}
"""Presets by environment id, without the version."""
