"""Games of text for two, by turns: against an opponent of the game's own, or with both sides played from outside
(`protocol.Players`), each player in a conversation of its own.

`act` makes the move of whose turn it is and returns what the next one sees, who is the same player where the opponent
has moved in between. `begin` returns what the first one sees, `introduce` what the other one sees before its first
turn, after `told`.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Sequence
from typing import Any

from components.environments.protocol import Messages, Step
from components.environments.tools import TextEnvironment
from components.trajectories.schema import Scenario


class TurnEnvironment(TextEnvironment):
    """To be subclassed in place of `TextEnvironment`, with `players`, `turn` and `introduce` too. With two players,
    `outcome` says under `players` how it ended for each, by name."""

    @property
    @abc.abstractmethod
    def players(self) -> Sequence[str]:
        """Names of those who have to be played: one where there is an opponent, else both."""

    @property
    @abc.abstractmethod
    def turn(self) -> int:
        """Whose turn it is, as a place in `players`."""

    @abc.abstractmethod
    def introduce(self) -> str:
        """What the player whose turn it is sees before its first one."""

    def reset(self, scenario: Scenario) -> Messages:
        self.calls: dict[int, list[list[Any]]] = {}
        """By player that has moved: the calls that its next observation answers, each with its answer, if it was none
        that moved."""
        self.mistakes: Counter[int] = Counter()
        """Invalid actions by player."""
        return super().reset(scenario)

    def step(self, action: dict[str, Any]) -> Step:
        self.mover = self.turn
        before = self.invalid_actions
        step = super().step(action)
        if len(self.players) == 1:
            return step
        answers = [one["content"] for one in step.observation if one["role"] == "tool"]
        moved = next((place for place, text in enumerate(answers) if not text.startswith("error: ")), 0)
        self.calls[self.mover] = [
            [call["id"], None if place == moved else text]
            for place, (call, text) in enumerate(zip(action.get("tool_calls") or [], answers, strict=True))
        ]
        self.mistakes[self.mover] += self.invalid_actions - before
        for place, name in enumerate(self.players):
            step.info["players"][name]["invalid_actions"] = self.mistakes[place]
        if not self.done and self.turn != self.mover:
            step.observation = self._to(self.turn)
        return step

    def save_turns(self) -> list[Any]:
        """What a saved state needs beside the game's own."""
        return [sorted(self.calls.items()), sorted(self.mistakes.items())]

    def restore_turns(self, state: list[Any]) -> None:
        self.calls, self.mistakes = dict(state[0]), Counter(dict(state[1]))

    def _act(self, text: str) -> str:
        if len(self.players) > 1 and self.turn != self.mover:
            self.invalid_actions += 1
            return "error: one move a turn"
        self.told = super()._act(text)
        return self.told

    def _to(self, player: int) -> Messages:
        """What a player is told when the other one has moved."""
        if player not in self.calls:
            first = {"role": "user", "content": self.introduce()}
            return [{"role": "system", "content": self.system}, first] if self.system else [first]
        if not self.calls[player]:
            return [{"role": "user", "content": self.told}]
        return [
            {"role": "tool", "tool_call_id": call, "content": self.told if answer is None else answer}
            for call, answer in self.calls[player]
        ]
