"""Base classes of environments that can save and restore an episode (`protocol.Restorable`)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar

from components.environments.protocol import Messages
from components.environments.tools import TextEnvironment, ToolEnvironment
from components.trajectories.schema import Scenario


class RestorableState(ToolEnvironment):
    """Environment whose state is a few attributes with JSON data, or with sets and tuples of JSON data.

    Subclasses define `saved`.
    """

    saved: ClassVar[tuple[str, ...]]
    """Names of the attributes, besides `invalid_actions` and `done`."""

    def save(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in (*self.saved, "invalid_actions", "done")}
        return {name: sorted(value) if isinstance(value, set) else deepcopy(value) for name, value in state.items()}

    def restore(self, scenario: Scenario, state: dict[str, Any]) -> None:
        self.reset(scenario)
        for name, value in deepcopy(state).items():
            kind = type(getattr(self, name))
            setattr(self, name, kind(value) if kind in (set, tuple) else value)


class RestorableActions(TextEnvironment):
    """Environment whose state is the list of its actions; they are executed again to restore it."""

    action_log: list[Any]
    """Actions of the episode, to which `act` adds."""

    def reset(self, scenario: Scenario) -> Messages:
        self.action_log = []
        return super().reset(scenario)

    def save(self) -> list[Any]:
        return [self.action_log, self.invalid_actions]

    def restore(self, scenario: Scenario, state: list[Any]) -> None:
        self.reset(scenario)
        actions, invalid = state
        for action in actions:
            self.repeat(action)
        self.invalid_actions = invalid

    def repeat(self, action: Any) -> None:
        """Execute an action of the log."""
        self.act(action)

    def _act(self, text: str) -> str:
        if self.done:
            self.invalid_actions += 1
            return f"{self.refusal}: the episode is over"
        return super()._act(text)
