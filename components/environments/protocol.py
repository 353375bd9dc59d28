"""The environment protocol.

An environment is a class whose constructor takes its configuration as keyword arguments. It lists its scenarios and
its tools. `reset` starts an episode and returns the first messages; `step` executes one action. Methods may be
synchronous or `async`. One instance serves one episode at a time; the collector creates as many instances as it needs.

An action is the assistant message in OpenAI's format: `{"role": "assistant", "content": str, "tool_calls": [...]}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from components.trajectories.schema import Scenario

Messages = list[dict[str, Any]]

ACT_TOOL = "act"
"""Name of the tool that takes an action as text, in place of an answer in text."""


@dataclass(slots=True)
class Step:
    """The result of a step."""

    observation: Messages
    """Next messages for the agent: results of its tool calls (role `tool`), or a user message."""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """JSON data. With `done`, it is stored as the outcome of the trajectory and should contain `success`."""
    new_context: bool = False
    """True: the agent continues without the conversation so far. The observation begins a new one, as the messages of
    `reset` do. The trajectory keeps both as separate histories."""


@runtime_checkable
class Environment(Protocol):
    """The methods that every environment has."""

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """Return all scenarios of a split in a fixed order; empty if the split does not exist."""
        ...

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools offered to the agent in the current episode, in OpenAI's JSON format; may be empty. Called
        after `reset`."""
        ...

    def reset(self, scenario: Scenario) -> Messages:
        """Start an episode; return the first messages (system and user)."""
        ...

    def step(self, action: dict[str, Any]) -> Step: ...

    def close(self) -> None: ...


@runtime_checkable
class Solver(Protocol):
    """An environment that can solve its own tasks; required for demonstrations."""

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the assistant messages of a correct solution, one per step."""
        ...

    # If some scenarios have no solution, define `check_solutions(scenarios)`: it raises SpecError if one of them has
    # none, and is called before the first episode.


@runtime_checkable
class LegalActions(Protocol):
    """An environment that lists its legal actions; required for the policy `random` where actions are free text."""

    def legal_actions(self) -> Sequence[str]:
        """Return the texts of the actions that are legal now: arguments of the only tool, or contents of a message."""
        ...


@runtime_checkable
class Restorable(Protocol):
    """An environment that can resume from a saved state; required for Monte Carlo values and forked episodes."""

    def save(self) -> Any:
        """Return the state of the episode, as JSON data."""
        ...

    def restore(self, scenario: Scenario, state: Any) -> None:
        """Restore a state that any instance saved in an episode of the same scenario."""
        ...


@dataclass(frozen=True)
class WorkFolder:
    """Folder in which a program acts."""

    path: Path
    """The folder on this machine."""
    at: str = "/tmp/work"
    """Its path for the program."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the program, besides its own."""
    seconds: float | None = None
    """Time limit of the program, besides that of the episode; None for no other."""
    hidden: Sequence[Path] = ()
    """Folders of this machine that the program cannot read, such as those with solutions."""


@runtime_checkable
class Workspace(Protocol):
    """An environment whose tasks are files. `step` scores the folder, whatever the answer is."""

    @property
    def workspace(self) -> WorkFolder:
        """Return the folder of the current episode, in which a program acts (`agent.command`). Called after `reset`."""
        ...

    # If a program cannot do some scenarios, define `check_program(scenarios)`: it raises SpecError if one of them is
    # such, and is called before the first episode.


@runtime_checkable
class Players(Protocol):
    """An environment whose episodes have several players that alternate, each with its own conversation; required for
    self-play. `reset` and `step` return the messages for the player who moves next; before its first turn these include
    the rules (system and user). With `done`, they are those of the player who moved last, and `info["players"]` holds
    the outcome of each player by name. The constructor takes an argument `opponent`; `agent` enables self-play."""

    @property
    def players(self) -> Sequence[str]:
        """Return the names of the players that policies control in this episode; one name if there is an opponent."""
        ...

    @property
    def turn(self) -> int:
        """Return the player who moves next, as an index into `players`."""
        ...
