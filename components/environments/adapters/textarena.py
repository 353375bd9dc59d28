"""TextArena: games in words, for one player or for two.

In a game for two the agent plays one seat, each in turn; the other is an opponent's: random or first among the moves
that the game allows, a function, or nobody's (`opponent: agent`), so that whoever plays the episode speaks for both
(`protocol.Players`). Games that want a language model as jury, word lists that have to be downloaded, or more than two
players are refused. The games themselves are in `textarena_games`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from components.environments.adapters.textarena_games import MOVES, SHOWN, Game, game_of
from components.environments.protocol import Messages, Step
from components.environments.scenario_counts import Count
from components.environments.tools import Invalid, TextEnvironment
from components.errors import EnvironmentFailed, Problem, SpecError
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LONGEST_ACTION = 1_000
"""Characters, as in the package."""
TRIED = 400
"""Moves that an opponent tries at most."""


@dataclass(frozen=True)
class Turn:
    """What an opponent that is a function knows: `(Turn) -> str`."""

    game: str
    player: int
    told: str
    """All that this player was told so far."""
    random: random.Random
    """Of the scenario: equal turns, equal numbers."""


@registered("environment.textarena")
class TextArena(TextEnvironment):
    """games: by id, as TicTacToe-v0, mixed evenly. opponent: in games for two, `random` or `first` among the possible
    moves, a function `(textarena.Turn) -> str`, or `agent`: whoever plays the episode plays both. seed: of the
    scenarios. train, heldout: scenarios of the two splits. max_steps: actions of the agent after which an episode ends.

    Scenario types: the games. Difficulty: by the variant's name, see LEVELS.
    """

    system = (
        "You play a game. Read its rules, then answer each time with your move, in the form that the rules ask for."
    )

    def __init__(
        self,
        games: Annotated[Sequence[str], Field(min_length=1)] = ("TicTacToe-v0", "Nim-v0", "GuessTheNumber-v0"),
        opponent: Literal["random", "first", "agent"] | Callable[[Turn], str] = "random",
        seed: int = 0,
        train: Count = 256,
        heldout: Count = 64,
        max_steps: Annotated[int, Field(ge=1)] = 60,
    ):
        self._games = {name: game_of(name) for name in games}
        if opponent in ("random", "first"):
            for name, game in self._games.items():
                if game.players == 2 and game.family not in (*MOVES, *SHOWN):
                    known = ", ".join(sorted([*MOVES, *SHOWN]))
                    message = f"{opponent} knows no moves of {name}, only those of {known}; give a function, or agent"
                    raise SpecError([Problem("environment.opponent", message)])
        self.opponent, self.seed, self.max_steps = opponent, seed, max_steps
        self.counts = {"heldout": heldout, "train": train}
        self.game: Any = None

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """Heldout seeds come first: a larger train split then leaves them as they are."""
        first = {"heldout": 0, "train": self.counts["heldout"]}.get(split, 0)
        names = list(self._games)
        found = []
        for number in range(self.counts.get(split, 0)):
            name = names[number % len(names)]
            seed = (self.seed * 1_000_003 + first + number) % 2**31
            given: dict[str, Any] = {"game": name, "seed": seed}
            if self._games[name].players == 2 and self.opponent != "agent":
                given["seat"] = number // len(names) % 2
            found.append(Scenario(f"{name}-{seed}", given, split, name, self._games[name].difficulty))
        return found

    # The episode

    @property
    def players(self) -> list[str]:
        """Who has to be played: one, or both where there is no opponent."""
        return ["Player 0", "Player 1"] if self._both() else ["Player"]

    @property
    def turn(self) -> int:
        """Of the players, whose turn it is."""
        return self.game.player if self._both() else 0

    def begin(self, scenario: Scenario) -> str:
        self.game = Game(self._games[scenario.input["game"]], scenario.input["seed"])
        self.mine = scenario.input.get("seat", 0)
        self.steps = 0
        self.calls: dict[int, list[str]] = {}
        """Of each player that has moved, the calls that its next observation answers."""
        self.moved = False
        self._let_others_play()
        return self._told()

    def step(self, action: dict[str, Any]) -> Step:
        self.moved = False
        mover = self.game.player
        step = super().step(action)
        now = self.game.player
        if self._both():
            calls = [one["id"] for one in action.get("tool_calls") or []]
            self.calls[mover] = calls
            if now != mover and not self.done:
                step.observation = self._to(now)
        return step

    def act(self, action: str) -> str:
        if self.game.over:
            raise Invalid("the episode is over")
        if not action:
            raise Invalid("say a move")
        if self.moved and self._both():
            raise Invalid("one move a turn")
        self.moved = True
        self.steps += 1
        self.invalid_actions += not self.game.play(action[:LONGEST_ACTION])
        self._let_others_play()
        self.done = self.game.over or self.steps >= self.max_steps
        self.last = self._told()
        return self.last

    def outcome(self, answer: str) -> dict[str, Any]:
        if self._both():
            results = {name: self._result(player) for player, name in enumerate(self.players)}
            first = results["Player 0"]
            return {**first, "steps": self.steps, "players": results}
        return {**self._result(self.mine), "steps": self.steps}

    def save(self) -> Any:
        return [self.game.actions, self.invalid_actions, self.steps, sorted(self.calls.items())]

    def restore(self, scenario: Scenario, state: Any) -> None:
        """Plays the actions of both sides again."""
        self.reset(scenario)
        actions, self.invalid_actions, self.steps, calls = state
        self.calls = dict(calls)
        self.game = Game(self._games[scenario.input["game"]], scenario.input["seed"])
        for player, action in actions:
            self.game.told(player)
            self.game.play(action)
        self.last = self._told()

    def _both(self) -> bool:
        return self.game is not None and self.game.kind.players == 2 and self.opponent == "agent"

    def _told(self) -> str:
        """What is new to whoever plays now; at the end to the agent."""
        player = self.game.player if self._both() else self.mine
        return str(self.game.told(player)) or "(nothing new)"

    def _to(self, player: int) -> Messages:
        """What a player is told whose turn it is now, after another's move: before its first one also the rules."""
        if player not in self.calls:
            return [{"role": "system", "content": self.system}, {"role": "user", "content": self.last}]
        if not self.calls[player]:
            return [{"role": "user", "content": self.last}]
        told = [self.last, *["error: one move a turn"] * (len(self.calls[player]) - 1)]
        return [
            {"role": "tool", "tool_call_id": one, "content": text}
            for one, text in zip(self.calls[player], told, strict=True)
        ]

    def _let_others_play(self) -> None:
        while not self.game.over and not self._both() and self.game.player != self.mine:
            self.game.play(self._opponents_move())

    def _opponents_move(self) -> str:
        player = self.game.player
        draw = random.Random(f"{self.game.seed} {len(self.game.actions)}")
        self.game.told(player)
        if callable(self.opponent):
            turn = Turn(self.game.kind.id, player, "\n".join(self.game.texts[player]), draw)
            return str(self.opponent(turn))[:LONGEST_ACTION]
        moves = self.game.candidates()
        if self.opponent == "random":
            draw.shuffle(moves)
        for move in moves[:TRIED]:
            if self.game.allows(move):
                return move
        raise EnvironmentFailed(f"{self.game.kind.id}: the opponent found no move among {moves[:20]}")

    def _result(self, player: int) -> dict[str, Any]:
        """Of a game for two: 1 for a win, 0.5 for a draw; of a game for one what it says, 1 being the best."""
        rewards = self.game.rewards
        if rewards is None:
            return {"success": False, "progress": 0.0, "result": "open"}
        reward = float(rewards.get(player, 0.0))
        if self.game.kind.players == 1:
            return {"success": reward >= 1.0, "progress": min(1.0, max(0.0, reward)), "result": self.game.reason}
        result = "win" if reward > 0 else "loss" if reward < 0 else "draw"
        return {"success": reward > 0, "progress": {"win": 1.0, "draw": 0.5, "loss": 0.0}[result], "result": result}
