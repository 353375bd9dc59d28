"""The environment protocol.

An environment is a class whose constructor takes its configuration as keyword arguments. It states its scenarios
and its tools; `reset` starts one episode and returns what the agent sees first; `step` carries out one action.
Methods may be plain or `async`. One instance serves one episode at a time; the collector makes as many as it needs.

An action is the assistant's message in OpenAI's form: `{"role": "assistant", "content": str, "tool_calls": [...]}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from components.trajectories.schema import Scenario

Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Step:
    """What a step returns."""

    observation: Messages
    """Messages the agent sees next: answers to its tool calls (role `tool`), or a user's words."""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """JSON data. With `done`, it is kept as the trajectory's outcome and should say `success`."""


@runtime_checkable
class Environment(Protocol):
    def scenarios(self, split: str) -> Sequence[Scenario]:
        """All scenarios of a split, in a fixed order; empty where there is no such split."""
        ...

    def tools(self) -> list[dict[str, Any]]:
        """Tools offered to the agent, in OpenAI's JSON form; may be empty."""
        ...

    def reset(self, scenario: Scenario) -> Messages:
        """Starts an episode; returns the first messages (system and user)."""
        ...

    def step(self, action: dict[str, Any]) -> Step: ...

    def close(self) -> None: ...


@runtime_checkable
class Solver(Protocol):
    """An environment that can show how its tasks are solved; needed for demonstrations."""

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """The assistant messages of a right solution, one for each step."""
        ...


@runtime_checkable
class Restorable(Protocol):
    """An environment that can go on from a state that was saved: what Monte Carlo values and forks of episodes need."""

    def save(self) -> Any:
        """The state of the episode, as JSON data."""
        ...

    def restore(self, scenario: Scenario, state: Any) -> None:
        """Puts this instance where another one was when it saved, in an episode of the same scenario."""
        ...


@runtime_checkable
class Players(Protocol):
    """An environment whose episode is played by several in turns, each in a conversation of its own: what self-play
    needs. `reset` and `step` return what the player sees whose turn it is then, before its first turn also the rules
    (system and user). With `done`, they are of who moved last, and `info["players"]` holds the outcome of each player
    by its name. It takes an argument `opponent`, which `agent` sets to this."""

    @property
    def players(self) -> Sequence[str]:
        """Names of those who have to be played in the episode that was reset; one where there is an opponent."""
        ...

    @property
    def turn(self) -> int:
        """Whose turn it is, as a place in `players`."""
        ...
