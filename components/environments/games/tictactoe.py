"""Tic-tac-toe against a scripted opponent with an error rate, or with both sides played by agents.

The opponent plays the best move, or a random move with the probability of its error rate. Its moves are a function of
the scenario and the moves so far, so episodes are reproducible. Against an opponent with errors the agent must win;
against a perfect one a draw is a success. In the outcome, `result` is win, draw, loss or open, and `progress` is 1,
0.5, 0 and 0, respectively.

With `opponent: agent` the caller plays both sides (`protocol.Players`), from an empty board. A draw is then no success
for either side.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from components.environments.seeded import ALL, Count, Difficulties, GeneratedGame
from components.environments.tools import InvalidAction, acts
from components.environments.turn_taking import TurnEnvironment
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LEVELS = {1: 1.0, 2: 0.7, 3: 0.5, 4: 0.3, 5: 0.0}
"""Probability of a random opponent move, by difficulty."""
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
EMPTY = "123456789"
"""Empty board. A board has nine characters: a cell contains X, O or its own number."""


@registered("environment.tictactoe")
class TicTacToe(TurnEnvironment, GeneratedGame):
    """seed: generator seed. train, heldout: scenarios of the two splits. difficulties: used in rotation. opponent:
    `scripted`, or `agent`: the caller plays both sides.

    Scenario types: first (the agent is X and begins), second (the agent is O). Difficulty: see LEVELS.
    """

    saved = ("board",)

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
            if next(_winning_lines(_opening(task), task), None) is not None:
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
            raise InvalidAction("a move is the number of a cell, 1 to 9")
        if match[1] not in self.board:
            raise InvalidAction(f"cell {match[1]} is taken")
        mover, reply = _turn(self.board), ""
        if self.both:
            self.board = self.board.replace(match[1], mover)
        else:
            self.board, reply = _after(self.board, match[1], self.scenario.input)
        self.done = _over(self.board)
        move_text = (
            f"I play {reply}.\n" if reply else "" if self.done or not self.both else f"{mover} plays {match[1]}.\n"
        )
        result = {"win": "\nYou win.", "draw": "\nA draw.", "loss": "\nYou lose.", "open": ""}
        return f"{move_text}{_shown(self.board)}{result[self._result(mover)]}"

    def legal_actions(self) -> list[str]:
        return _free(self.board)

    def outcome(self, answer: str) -> dict[str, Any]:
        own, *other = (self._outcome(mark) for mark in self.players)
        return {**own, "players": dict(zip(self.players, [own, *other], strict=True))} if self.both else own

    def _outcome(self, mark: str) -> dict[str, Any]:
        result = self._result(mark)
        success = result == "win" if self.both else _reached(self.board, self.scenario.input)
        return {"success": success, "progress": {"win": 1.0, "draw": 0.5}.get(result, 0.0), "result": result}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return moves that reach the goal against this opponent; best moves come first in the search."""
        moves = next(_winning_lines(_opening(scenario.input), scenario.input), None)
        assert moves is not None, "`task` generates solvable scenarios only"
        return acts(moves)

    def save(self) -> dict[str, Any]:
        return {"game": super().save(), "turns": self.save_turns()}

    def restore(self, scenario: Scenario, state: dict[str, Any]) -> None:
        super().restore(scenario, state["game"])
        self.restore_turns(state["turns"])

    def _result(self, mark: str) -> str:
        """Return the result for a player: win, draw, loss or open."""
        if not _over(self.board):
            return "open"
        winner = _winner(self.board)
        return "draw" if winner is None else "win" if winner == mark else "loss"


def _opening(task: dict[str, Any]) -> str:
    """Return the board before the agent's first move."""
    return EMPTY if task["mark"] == "X" else _reply(EMPTY, task)[0]


def _after(board: str, cell: str, task: dict[str, Any]) -> tuple[str, str]:
    """Return the board after the agent's move and the reply, and the reply ("" if the game is already over)."""
    board = board.replace(cell, task["mark"])
    return (board, "") if _over(board) else _reply(board, task)


def _reply(board: str, task: dict[str, Any]) -> tuple[str, str]:
    """Return the board after the opponent's move, and the move."""
    rng = random.Random(f"{task['opponent']} {board}")
    moves = _free(board) if rng.random() < task["errors"] else _best(board)
    move = rng.choice(moves)
    return board.replace(move, _turn(board)), move


def _reached(board: str, task: dict[str, Any]) -> bool:
    """Return True if the game is over and the agent has reached its goal: a win, or a draw with a perfect opponent."""
    winner = _winner(board)
    return winner == task["mark"] or (winner is None and not _free(board) and not task["errors"])


def _winning_lines(board: str, task: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the agent's move sequences that reach the goal against this opponent, minimax-optimal moves first."""
    best = _best(board)
    for cell in sorted(_free(board), key=lambda move: move not in best):
        after, _ = _after(board, cell, task)
        if _over(after):
            if _reached(after, task):
                yield [cell]
        else:
            for continuation in _winning_lines(after, task):
                yield [cell, *continuation]


def _best(board: str) -> list[str]:
    """Return the moves of the greatest value for the player to move."""
    values = {move: -_value(board.replace(move, _turn(board))) for move in _free(board)}
    return [move for move, value in values.items() if value == max(values.values())]


@functools.lru_cache(maxsize=6000)  # all reachable boards
def _value(board: str) -> int:
    """Return the minimax value for the player to move: 1 is a win, 0 a draw, -1 a loss."""
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
