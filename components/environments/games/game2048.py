"""2048: slide the tiles of a square board; equal ones that meet merge into their sum.

After each move that changes the board a tile appears in an empty cell: a 2, or in one case of ten a 4. Which and where
follows from the scenario, the number of the move and the board, so equal moves meet equal boards. The goal is a tile,
smaller than 2048, within a number of moves; a move that changes nothing is told to be invalid and is not counted.

The reward of a step is what it merged, in units of what it takes to merge the goal tile out of 2s: about 1 in the sum
of an episode that reaches it. The outcome's `progress` is the number of doublings of the largest tile, out of those
that the goal takes.
"""

from __future__ import annotations

import functools
import math
import random
from typing import Any

from components.environments.seeded import GeneratedGame
from components.environments.tools import Invalid, acts
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LEVELS = {1: (3, 16, 12), 2: (3, 32, 22), 3: (3, 64, 42), 4: (4, 128, 80), 5: (4, 256, 160)}
"""Cells on a side, goal tile, and moves, by difficulty."""
BEAM = 100
"""Boards that the search goes on with."""
DIRECTIONS = ("left", "down", "right", "up")

Row = tuple[int, ...]
Board = tuple[Row, ...]
"""Rows of tiles; 0 is an empty cell."""


@registered("environment.game2048")
class Game2048(GeneratedGame):
    """seed: of the generator. train, heldout: scenarios of the two splits. difficulties: those that occur, in turn.

    Scenario types: 3x3, 4x4. Difficulty: see LEVELS.
    """

    name = "game2048"
    system = (
        "You play 2048. A move slides all tiles to one side; equal ones that meet merge into their sum. Give one move, "
        "alone: left, down, right or up."
    )

    @staticmethod
    def task(rng: random.Random, difficulty: int, split: str) -> tuple[str, dict[str, Any]]:
        size, goal, moves = LEVELS[difficulty]
        return f"{size}x{size}", {"size": size, "goal": goal, "moves": moves, "spawns": rng.randrange(10**9)}

    def begin(self, scenario: Scenario) -> str:
        self.board, self.moves = _opening(scenario.input), 0
        given = scenario.input
        return f"Make a tile of {given['goal']} or more. You have {given['moves']} moves.\n{shown(self.board)}"

    def act(self, action: str) -> str:
        move = action.lower()
        if move not in DIRECTIONS:
            raise Invalid(f"a move is one of {', '.join(DIRECTIONS)}")
        board, merged = slid(self.board, move)
        if board == self.board:
            raise Invalid(f"nothing moves {move}")
        self.moves += 1
        self.board = _spawned(board, self.scenario.input["spawns"], self.moves)
        goal = self.scenario.input["goal"]
        self.reward += merged / (goal * (math.log2(goal) - 1))
        left, reached = self.scenario.input["moves"] - self.moves, _largest(self.board) >= goal
        stuck = not _open(self.board)
        self.done = reached or stuck or left == 0
        told = "Done." if reached else "No move is left." if stuck else f"{left} moves left"
        return f"{shown(self.board)}\n{told}"

    def outcome(self, answer: str) -> dict[str, Any]:
        goal, largest = self.scenario.input["goal"], _largest(self.board)
        progress = min(1.0, math.log2(largest / 2) / math.log2(goal / 2))
        return {"success": largest >= goal, "progress": progress, "largest": largest, "moves": self.moves}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """The moves of `best`, which does not know what will appear; where these fail, those of a search that does."""
        moves = _played(scenario.input)
        return acts(moves if moves is not None else _sought(scenario.input))

    def save(self) -> list[Any]:
        return [self.board, self.moves, self.done, self.invalid_actions]

    def restore(self, scenario: Scenario, state: list[Any]) -> None:
        self.reset(scenario)
        self.board = tuple(tuple(row) for row in state[0])
        self.moves, self.done, self.invalid_actions = state[1:]


def slid(board: Board, move: str) -> tuple[Board, int]:
    """The board after a move, before a tile appears, and the sum of the tiles that it made."""
    upright = move in ("up", "down")
    rows = tuple(zip(*board, strict=True)) if upright else board
    backward = move in ("right", "down")
    after = [_pushed(row[::-1] if backward else row) for row in rows]
    rows = tuple(row[::-1] if backward else row for row, _ in after)
    return tuple(zip(*rows, strict=True)) if upright else rows, sum(merged for _, merged in after)


@functools.lru_cache(maxsize=100_000)
def _pushed(row: Row) -> tuple[Row, int]:
    """A row pushed to its start; each tile merges once."""
    tiles = [tile for tile in row if tile]
    done: list[int] = []
    merged = 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            merged += tile
        done.append(tile)
    return (*done, *[0] * (len(row) - len(done))), merged


def best(board: Board) -> str:
    """The move after which the board is best on average over what may appear, one move ahead of that."""
    values = {move: _after(after) for move in DIRECTIONS if (after := slid(board, move)[0]) != board}
    return max(values, key=lambda move: values[move])


def _after(board: Board) -> float:
    """Average over the tiles that may appear of the best that a move makes of it."""
    cells = _empty(board)
    total = 0.0
    for tile, chance in ((2, 0.9), (4, 0.1)):
        for cell in cells:
            placed = _with(board, cell, tile)
            moved = [after for move in DIRECTIONS if (after := slid(placed, move)[0]) != placed]
            total += chance * max(map(worth, moved), default=0.0)
    return total / len(cells)


@functools.lru_cache(maxsize=100_000)
def worth(board: Board) -> float:
    """How good a board is: large tiles in a corner and beside their like, and empty cells."""
    return max(_weighed(board), _weighed(tuple(zip(*board, strict=True)))) * (1 + 0.05 * len(_empty(board)))


def _weighed(board: Board) -> float:
    """Tiles, each counted half as much as the one before on a way that winds from a corner through the board."""
    total, weight = 0.0, 1.0
    for number, row in enumerate(board):
        for tile in row if number % 2 == 0 else row[::-1]:
            total += weight * tile
            weight /= 2
    return total


def _played(task: dict[str, Any]) -> list[str] | None:
    """The moves of `best`, where they reach the goal in time."""
    board, moves = _opening(task), list[str]()
    while _largest(board) < task["goal"]:
        if not _open(board) or len(moves) == task["moves"]:
            return None
        moves.append(best(board))
        board = _spawned(slid(board, moves[-1])[0], task["spawns"], len(moves))
    return moves


def _sought(task: dict[str, Any]) -> list[str]:
    """The moves of a beam search over the tiles that will appear; as far as it came where none reaches the goal."""
    beam: dict[Board, list[str]] = {_opening(task): []}
    moves: list[str] = []
    for number in range(1, task["moves"] + 1):
        ahead: dict[Board, list[str]] = {}
        for board, moves in beam.items():
            for move in DIRECTIONS:
                after, _ = slid(board, move)
                if after != board:
                    ahead.setdefault(_spawned(after, task["spawns"], number), [*moves, move])
        if not ahead:
            break
        beam = {board: ahead[board] for board in sorted(ahead, key=worth, reverse=True)[:BEAM]}
        board, moves = next(iter(beam.items()))
        if reached := [way for board, way in ahead.items() if _largest(board) >= task["goal"]]:
            return reached[0]
    return moves


def _opening(task: dict[str, Any]) -> Board:
    empty = ((0,) * task["size"],) * task["size"]
    return _spawned(_spawned(empty, task["spawns"], -1), task["spawns"], 0)


def _spawned(board: Board, spawns: int, number: int) -> Board:
    rng = random.Random(f"{spawns} {number}")
    return _with(board, rng.choice(_empty(board)), 4 if rng.random() < 0.1 else 2)


def _with(board: Board, cell: tuple[int, int], tile: int) -> Board:
    row, column = cell
    changed = (*board[row][:column], tile, *board[row][column + 1 :])
    return (*board[:row], changed, *board[row + 1 :])


def _empty(board: Board) -> list[tuple[int, int]]:
    return [(row, column) for row, tiles in enumerate(board) for column, tile in enumerate(tiles) if not tile]


def _open(board: Board) -> bool:
    """Whether some move changes the board."""
    return any(slid(board, move)[0] != board for move in DIRECTIONS)


def _largest(board: Board) -> int:
    return max(map(max, board))


def shown(board: Board) -> str:
    return "\n".join(" ".join(str(tile or ".") for tile in row) for row in board)
