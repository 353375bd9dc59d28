"""Turn-based text games for two players: against a built-in opponent, or with both sides controlled by policies
(`protocol.Players`), each player in its own conversation.

`act` makes the move of the current player and returns the observation of the next one; against a built-in opponent this
is the same player, after the opponent's move. `begin` returns the first observation of the first player, `introduce`
that of the second player. `last_observation` is the observation after the last move.
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
    """Base class, in place of `TextEnvironment`: subclasses also define `players`, `turn` and `introduce`.

    With two players, `outcome` returns under `players` the outcome of each player by name.
    """

    @property
    @abc.abstractmethod
    def players(self) -> Sequence[str]:
        """Return the names of the players that policies control: one if there is an opponent, otherwise both."""

    @property
    @abc.abstractmethod
    def turn(self) -> int:
        """Return the player who moves next, as an index into `players`."""

    @abc.abstractmethod
    def introduce(self) -> str:
        """Return the observation of the current player before its first move."""

    def reset(self, scenario: Scenario) -> Messages:
        self.calls: dict[int, list[list[Any]]] = {}
        """For each player that has moved: the calls that its next observation answers, as [id, result]; the result of
        the call that made the move is None until the other player has moved."""
        self.mistakes: Counter[int] = Counter()
        """Number of invalid actions by player."""
        return super().reset(scenario)

    def step(self, action: dict[str, Any]) -> Step:
        self.mover = self.turn
        before = self.invalid_actions
        step = super().step(action)
        if len(self.players) == 1:
            return step
        results = [message["content"] for message in step.observation if message["role"] == "tool"]
        move = next((index for index, text in enumerate(results) if not text.startswith(f"{self.refusal}: ")), 0)
        self.calls[self.mover] = [
            [call["id"], None if index == move else text]
            for index, (call, text) in enumerate(zip(action.get("tool_calls") or [], results, strict=True))
        ]
        self.mistakes[self.mover] += self.invalid_actions - before
        for index, name in enumerate(self.players):
            step.info["players"][name]["invalid_actions"] = self.mistakes[index]
        if not self.done and self.turn != self.mover:
            step.observation = self._observation(self.turn)
        return step

    def save_turns(self) -> list[Any]:
        """Return the state of the turns, which subclasses add to their own saved state."""
        return [sorted(self.calls.items()), sorted(self.mistakes.items())]

    def restore_turns(self, state: list[Any]) -> None:
        """Restore the state that `save_turns` returned."""
        self.calls, self.mistakes = dict(state[0]), Counter(dict(state[1]))

    def _act(self, text: str) -> str:
        if len(self.players) > 1 and self.turn != self.mover:
            self.invalid_actions += 1
            return f"{self.refusal}: one move a turn"
        self.last_observation = super()._act(text)
        return self.last_observation

    def _observation(self, player: int) -> Messages:
        """Return the messages for a player after the other one has moved."""
        if player not in self.calls:
            first = {"role": "user", "content": self.introduce()}
            return [{"role": "system", "content": self.system}, first] if self.system else [first]
        if not self.calls[player]:
            return [{"role": "user", "content": self.last_observation}]
        return [
            {"role": "tool", "tool_call_id": call, "content": self.last_observation if result is None else result}
            for call, result in self.calls[player]
        ]
