"""Tic-tac-toe against an opponent that errs more or less, or with both sides played from outside.

The opponent plays the best move, or, as often as its errors say, a random one. What it does depends on the scenario
and on the moves so far, nothing else, so an episode can be repeated. Against an opponent that errs the agent must win;
against one that never does nobody can, and a draw is a success. The outcome says which it was: `result` is win, draw,
loss or open; `progress` is 1, 0.5, 0 and 0.

With `opponent: agent` both sides are played from outside (`protocol.Players`), on an empty board, and a draw is a
success of neither.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from components.environments.scenario_counts import Count
from components.environments.seeded import ALL, Difficulties, GeneratedGame
from components.environments.tools import Invalid, acts
from components.environments.turn_taking import TurnEnvironment
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LEVELS = {1: 1.0, 2: 0.7, 3: 0.5, 4: 0.3, 5: 0.0}
"""Share of the opponent's moves that are random, by difficulty."""
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
EMPTY = "123456789"
"""A board is nine characters: a cell holds X, O or its own number."""


@registered("environment.tictactoe")
class TicTacToe(TurnEnvironment, GeneratedGame):
    """seed: of the generator. train, heldout: scenarios of the two splits. difficulties: those that occur, in turn.
    opponent: the scripted one, or `agent`: whoever plays the episode plays both sides.

    Scenario types: first, second (the agent is X and begins, or O). Difficulty: see LEVELS.
    """

    name = "tictactoe"
    system = "You play tic-tac-toe. Three in a line win. Give the number of the cell to play, alone."

    def __init__(
        self,
        seed: int = 0,
        train: Count = 512,
        heldout: Count = 128,
        difficulties: Difficulties = ALL,
        opponent: Literal["scripted", "agent"] = "scripted",
    ):
        super().__init__(seed, train, heldout, difficulties)
        self.both = opponent == "agent"

    @staticmethod
    def task(rng: random.Random, difficulty: int, split: str) -> tuple[str, dict[str, Any]]:
        while True:
            mark = rng.choice("XO")
            task = {"mark": mark, "errors": LEVELS[difficulty], "opponent": rng.randrange(10**9)}
            if next(_ways(_opening(task), task), None) is not None:
                return "first" if mark == "X" else "second", task

    @property
    def players(self) -> Sequence[str]:
        mark = self.scenario.input["mark"]
        return [mark, "XO".replace(mark, "")] if self.both else [mark]

    @property
    def turn(self) -> int:
        return self.players.index(_turn(self.board)) if self.both else 0

    def begin(self, scenario: Scenario) -> str:
        self.board = EMPTY if self.both else _opening(scenario.input)
        return self.introduce()

    def introduce(self) -> str:
        aim = "Win." if self.both or self.scenario.input["errors"] else "Do not lose."
        return f"You are {self.players[self.turn]}. {aim}\n{_shown(self.board)}"

    def act(self, action: str) -> str:
        match = re.fullmatch(r"(?:play )?([1-9])", action.lower())
        if not match:
            raise Invalid("a move is the number of a cell, 1 to 9")
        if match[1] not in self.board:
            raise Invalid(f"cell {match[1]} is taken")
        mover, reply = _turn(self.board), ""
        if self.both:
            self.board = self.board.replace(match[1], mover)
        else:
            self.board, reply = _after(self.board, match[1], self.scenario.input)
        self.done = _over(self.board)
        told = f"I play {reply}.\n" if reply else "" if self.done or not self.both else f"{mover} plays {match[1]}.\n"
        result = {"win": "\nYou win.", "draw": "\nA draw.", "loss": "\nYou lose.", "open": ""}
        return f"{told}{_shown(self.board)}{result[self._result(mover)]}"

    def outcome(self, answer: str) -> dict[str, Any]:
        own, *other = (self._outcome(mark) for mark in self.players)
        return {**own, "players": dict(zip(self.players, [own, *other], strict=True))} if self.both else own

    def _outcome(self, mark: str) -> dict[str, Any]:
        result = self._result(mark)
        success = result == "win" if self.both else _reached(self.board, self.scenario.input)
        return {"success": success, "progress": {"win": 1.0, "draw": 0.5}.get(result, 0.0), "result": result}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """The best moves; where they do not reach the goal against this opponent, the best ones that do."""
        found = next(_ways(_opening(scenario.input), scenario.input), None)
        assert found is not None, "task has tried it"
        return acts(found)

    def save(self) -> list[Any]:
        return [self.board, self.done, self.invalid_actions, *self.save_turns()]

    def restore(self, scenario: Scenario, state: list[Any]) -> None:
        self.reset(scenario)
        self.board, self.done, self.invalid_actions, *turns = state
        self.restore_turns(turns)

    def _result(self, mark: str) -> str:
        """How it stands for a player."""
        if not _over(self.board):
            return "open"
        won = _winner(self.board)
        return "draw" if won is None else "win" if won == mark else "loss"


def _opening(task: dict[str, Any]) -> str:
    """The board before the agent's first move."""
    return EMPTY if task["mark"] == "X" else _reply(EMPTY, task)[0]


def _after(board: str, cell: str, task: dict[str, Any]) -> tuple[str, str]:
    """The board after the agent's move and the opponent's, and the opponent's; empty where the game is over first."""
    board = board.replace(cell, task["mark"])
    return (board, "") if _over(board) else _reply(board, task)


def _reply(board: str, task: dict[str, Any]) -> tuple[str, str]:
    """The opponent's move."""
    rng = random.Random(f"{task['opponent']} {board}")
    moves = _free(board) if rng.random() < task["errors"] else _best(board)
    move = rng.choice(moves)
    return board.replace(move, _turn(board)), move


def _reached(board: str, task: dict[str, Any]) -> bool:
    """Whether the game is over with what the agent must reach."""
    won = _winner(board)
    return won == task["mark"] or (won is None and not _free(board) and not task["errors"])


def _ways(board: str, task: dict[str, Any]) -> Iterator[list[str]]:
    """The agent's moves that reach the goal against this opponent; what is best against any comes first."""
    best = _best(board)
    for cell in sorted(_free(board), key=lambda move: move not in best):
        after, _ = _after(board, cell, task)
        if _over(after):
            if _reached(after, task):
                yield [cell]
        else:
            for rest in _ways(after, task):
                yield [cell, *rest]


def _best(board: str) -> list[str]:
    """The moves of the greatest value for whose turn it is."""
    values = {move: -_value(board.replace(move, _turn(board))) for move in _free(board)}
    return [move for move, value in values.items() if value == max(values.values())]


@functools.lru_cache(maxsize=6000)  # all boards there are
def _value(board: str) -> int:
    """For whose turn it is: 1 a win, 0 a draw, -1 a loss, when both play their best."""
    if _winner(board):
        return -1
    return max((-_value(board.replace(move, _turn(board))) for move in _free(board)), default=0)


def _turn(board: str) -> str:
    return "XO"[board.count("X") - board.count("O")]


def _free(board: str) -> list[str]:
    return [cell for cell in board if cell in EMPTY]


def _winner(board: str) -> str | None:
    return next((board[a] for a, b, c in LINES if board[a] == board[b] == board[c]), None)


def _over(board: str) -> bool:
    return _winner(board) is not None or not _free(board)


def _shown(board: str) -> str:
    return "\n".join(" ".join(board[row : row + 3]) for row in (0, 3, 6))
