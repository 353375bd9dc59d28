"""TextArena: text games for one or two players.

In a two-player game the agent plays one seat; the seats alternate between scenarios. The opponent plays a random or the
first valid move, or is a user function; with `opponent: agent` policies control both seats (`protocol.Players`). Games
that need a language model as jury, word lists that are not installed, or more than two players are rejected. The games
themselves are in `textarena_games`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from components.environments.adapters.textarena_games import LISTED, MOVES, TextArenaGame, load_kind
from components.environments.protocol import Messages, Step
from components.environments.seeded import Count, scenario_numbers
from components.environments.tools import InvalidAction, TextEnvironment
from components.errors import EnvironmentFailed, SpecError
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LONGEST_ACTION = 1_000
"""Maximum length of an action in characters, as in the package."""
MAX_CANDIDATES = 400
"""Maximum number of candidate moves that an opponent tries."""


@dataclass(frozen=True)
class Turn:
    """Argument of an opponent function `(Turn) -> str`."""

    game: str
    player: int
    transcript: str
    """All text that this player has seen so far."""
    random: random.Random
    """Random generator, seeded by the scenario and the number of past actions."""


@registered("environment.textarena")
class TextArena(TextEnvironment):
    """A mix of TextArena games.

    Scenario types: the games. Difficulty: by the name of the variant, see LEVELS.

    Args:
        games: Ids of games, such as TicTacToe-v0, in equal proportions.
        opponent: Opponent in two-player games: `random` or `first` among the valid moves, a function
            `(textarena.Turn) -> str`, or `agent`, policies control both players.
        seed: Seed of the scenarios.
        train, heldout: Number of scenarios of the split.
        max_steps: Maximum number of the agent's actions in an episode.
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
        self._games = {name: load_kind(name) for name in games}
        if opponent in ("random", "first"):
            for name, game in self._games.items():
                if game.players == 2 and game.family not in (*MOVES, *LISTED):
                    families = ", ".join(sorted([*MOVES, *LISTED]))
                    message = f"{opponent} does not support {name}, only {families}; set a function, or agent"
                    raise SpecError.at("environment.opponent", message)
        self.opponent, self.seed, self.max_steps = opponent, seed, max_steps
        self.counts = {"heldout": heldout, "train": train}
        self.game: Any = None

    def scenarios(self, split: str) -> Sequence[Scenario]:
        names = list(self._games)
        scenarios = []
        for index, number in enumerate(scenario_numbers(self.counts, split)):
            name = names[index % len(names)]
            seed = (self.seed * 1_000_003 + number) % 2**31
            input: dict[str, Any] = {"game": name, "seed": seed}
            if self._games[name].players == 2 and self.opponent != "agent":
                input["seat"] = index // len(names) % 2
            scenarios.append(Scenario(f"{name}-{seed}", input, split, name, self._games[name].difficulty))
        return scenarios

    # The episode

    @property
    def players(self) -> list[str]:
        """Return the names of the players that policies control: one if there is an opponent, otherwise both."""
        return ["Player 0", "Player 1"] if self._both() else ["Player"]

    @property
    def turn(self) -> int:
        """Return the player who moves next, as an index into `players`."""
        return self.game.player if self._both() else 0

    def begin(self, scenario: Scenario) -> str:
        self.game = TextArenaGame(self._games[scenario.input["game"]], scenario.input["seed"])
        self.seat = scenario.input.get("seat", 0)
        self.steps = 0
        self.calls: dict[int, list[str]] = {}
        """For each player that has moved: ids of the calls that its next observation answers."""
        self.moved = False
        self._play_opponent()
        return self._observation()

    def step(self, action: dict[str, Any]) -> Step:
        self.moved = False
        mover = self.game.player
        step = super().step(action)
        current = self.game.player
        if self._both():
            calls = [call["id"] for call in action.get("tool_calls") or []]
            self.calls[mover] = calls
            if current != mover and not self.done:
                step.observation = self._messages(current)
        return step

    def act(self, action: str) -> str:
        if self.game.over:
            raise InvalidAction("the episode is over")
        if not action:
            raise InvalidAction("say a move")
        if self.moved and self._both():
            raise InvalidAction("one move a turn")
        self.moved = True
        self.steps += 1
        self.invalid_actions += not self.game.play(action[:LONGEST_ACTION])
        self._play_opponent()
        self.done = self.game.over or self.steps >= self.max_steps
        self.last = self._observation()
        return self.last

    def outcome(self, answer: str) -> dict[str, Any]:
        if self._both():
            results = {name: self._result(player) for player, name in enumerate(self.players)}
            first = results["Player 0"]
            return {**first, "steps": self.steps, "players": results}
        return {**self._result(self.seat), "steps": self.steps}

    def save(self) -> Any:
        return [self.game.actions, self.invalid_actions, self.steps, sorted(self.calls.items())]

    def restore(self, scenario: Scenario, state: Any) -> None:
        """Restore a state by replaying the actions of both players."""
        self.reset(scenario)
        actions, self.invalid_actions, self.steps, calls = state
        self.calls = dict(calls)
        self.game = TextArenaGame(self._games[scenario.input["game"]], scenario.input["seed"])
        for player, action in actions:
            self.game.new_text(player)
            self.game.play(action)
        self.last = self._observation()

    def _both(self) -> bool:
        """Return True if policies control both players."""
        return self.game is not None and self.game.kind.players == 2 and self.opponent == "agent"

    def _observation(self) -> str:
        """Return the new text for the current player; against an opponent, for the agent."""
        player = self.game.player if self._both() else self.seat
        return str(self.game.new_text(player)) or "(nothing new)"

    def _messages(self, player: int) -> Messages:
        """Return the messages for a player after the other's move; before its first move also the rules."""
        if player not in self.calls:
            return [{"role": "system", "content": self.system}, {"role": "user", "content": self.last}]
        if not self.calls[player]:
            return [{"role": "user", "content": self.last}]
        results = [self.last, *["error: one move a turn"] * (len(self.calls[player]) - 1)]
        return [
            {"role": "tool", "tool_call_id": call_id, "content": text}
            for call_id, text in zip(self.calls[player], results, strict=True)
        ]

    def _play_opponent(self) -> None:
        while not self.game.over and not self._both() and self.game.player != self.seat:
            self.game.play(self._opponent_move())

    def _opponent_move(self) -> str:
        player = self.game.player
        rng = random.Random(f"{self.game.seed} {len(self.game.actions)}")
        self.game.new_text(player)
        if callable(self.opponent):
            turn = Turn(self.game.kind.id, player, "\n".join(self.game.texts[player]), rng)
            return str(self.opponent(turn))[:LONGEST_ACTION]
        moves = self.game.candidates()
        if self.opponent == "random":
            rng.shuffle(moves)
        for move in moves[:MAX_CANDIDATES]:
            if self.game.allows(move):
                return move
        raise EnvironmentFailed(f"{self.game.kind.id}: the opponent found no valid move among {moves[:20]}")

    def _result(self, player: int) -> dict[str, Any]:
        """Return the outcome of a player.

        Its progress is 1 for a win and 0.5 for a draw in a two-player game, the clipped reward in a one-player game.
        """
        rewards = self.game.rewards
        if rewards is None:
            return {"success": False, "progress": 0.0, "result": "open"}
        reward = float(rewards.get(player, 0.0))
        if self.game.kind.players == 1:
            return {"success": reward >= 1.0, "progress": min(1.0, max(0.0, reward)), "result": self.game.reason}
        result = "win" if reward > 0 else "loss" if reward < 0 else "draw"
        return {"success": reward > 0, "progress": {"win": 1.0, "draw": 0.5, "loss": 0.0}[result], "result": result}
