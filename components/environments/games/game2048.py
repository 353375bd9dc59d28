"""2048: slide the tiles of a square board; equal tiles that meet merge into their sum.

After each move that changes the board, a tile appears in an empty cell: a 2, or with probability 0.1 a 4. Tile and cell
are a function of the scenario, the move number and the board, so equal moves lead to equal boards. The goal is a tile,
smaller than 2048, within a limit of moves. A move that changes nothing is invalid and is not counted.

The reward of a step is the sum of the tiles that it merged, divided by the sum needed to merge the goal tile from 2s:
an episode that reaches the goal earns about 1 in total. The outcome's `progress` is the number of doublings of the
largest tile, divided by the number that the goal needs.
"""

from __future__ import annotations

import functools
import math
import random
from typing import Any

from components.environments.seeded import GeneratedGame
from components.environments.tools import InvalidAction, acts
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LEVELS = {1: (3, 16, 12), 2: (3, 32, 22), 3: (3, 64, 42), 4: (4, 128, 80), 5: (4, 256, 160)}
"""Side length in cells, goal tile and move limit, by difficulty."""
BEAM = 100
"""Width of the beam search, in boards."""
DIRECTIONS = ("left", "down", "right", "up")

Row = tuple[int, ...]
Board = tuple[Row, ...]
"""Rows of tiles; 0 is an empty cell."""


@registered("environment.game2048")
class Game2048(GeneratedGame):
    """seed: generator seed. train, heldout: scenarios of the two splits. difficulties: used in rotation.

    Scenario types: 3x3, 4x4. Difficulty: see LEVELS.
    """

    saved = ("board", "moves")

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
        self.board, self.moves = _initial_board(scenario.input), 0
        task = scenario.input
        return f"Make a tile of {task['goal']} or more. You have {task['moves']} moves.\n{board_text(self.board)}"

    def act(self, action: str) -> str:
        move = action.lower()
        if move not in DIRECTIONS:
            raise InvalidAction(f"a move is one of {', '.join(DIRECTIONS)}")
        board, merged = slide(self.board, move)
        if board == self.board:
            raise InvalidAction(f"nothing moves {move}")
        self.moves += 1
        self.board = _spawn(board, self.scenario.input["spawns"], self.moves)
        goal = self.scenario.input["goal"]
        self.reward += merged / (goal * (math.log2(goal) - 1))
        remaining, reached = self.scenario.input["moves"] - self.moves, _largest(self.board) >= goal
        stuck = not _can_move(self.board)
        self.done = reached or stuck or remaining == 0
        status = "Done." if reached else "No move is left." if stuck else f"{remaining} moves left"
        return f"{board_text(self.board)}\n{status}"

    def legal_actions(self) -> list[str]:
        return [move for move in DIRECTIONS if slide(self.board, move)[0] != self.board]

    def outcome(self, answer: str) -> dict[str, Any]:
        goal, largest = self.scenario.input["goal"], _largest(self.board)
        progress = min(1.0, math.log2(largest / 2) / math.log2(goal / 2))
        return {"success": largest >= goal, "progress": progress, "largest": largest, "moves": self.moves}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the moves of `best`, which does not know the next tiles; if they fail, those of a search that does."""
        moves = _greedy_moves(scenario.input)
        return acts(moves if moves is not None else _beam_search(scenario.input))

    def restore(self, scenario: Scenario, state: dict[str, Any]) -> None:
        super().restore(scenario, state)
        self.board = tuple(map(tuple, self.board))


def slide(board: Board, move: str) -> tuple[Board, int]:
    """Return the board after a move, before a tile appears, and the sum of the merged tiles."""
    upright = move in ("up", "down")
    rows = tuple(zip(*board, strict=True)) if upright else board
    backward = move in ("right", "down")
    after = [_push_row(row[::-1] if backward else row) for row in rows]
    rows = tuple(row[::-1] if backward else row for row, _ in after)
    return tuple(zip(*rows, strict=True)) if upright else rows, sum(merged for _, merged in after)


@functools.lru_cache(maxsize=100_000)
def _push_row(row: Row) -> tuple[Row, int]:
    """Return a row pushed to its start, and the sum of the merged tiles; each tile merges at most once."""
    tiles = [tile for tile in row if tile]
    pushed: list[int] = []
    merged = 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            merged += tile
        pushed.append(tile)
    return (*pushed, *[0] * (len(row) - len(pushed))), merged


def best(board: Board) -> str:
    """Return the move with the highest expected worth after the next tile and the move that follows it."""
    values = {move: _expected_worth(after) for move in DIRECTIONS if (after := slide(board, move)[0]) != board}
    return max(values, key=lambda move: values[move])


def _expected_worth(board: Board) -> float:
    """Return the worth of the best next move, averaged over the tiles that may appear."""
    cells = _empty_cells(board)
    total = 0.0
    for tile, chance in ((2, 0.9), (4, 0.1)):
        for cell in cells:
            placed = _place(board, cell, tile)
            moved = [after for move in DIRECTIONS if (after := slide(placed, move)[0]) != placed]
            total += chance * max(map(worth, moved), default=0.0)
    return total / len(cells)


@functools.lru_cache(maxsize=100_000)
def worth(board: Board) -> float:
    """Return a heuristic value of a board: high for large tiles in a corner next to similar ones, and empty cells."""
    weight = max(_snake_weight(board), _snake_weight(tuple(zip(*board, strict=True))))
    return weight * (1 + 0.05 * len(_empty_cells(board)))


def _snake_weight(board: Board) -> float:
    """Return the weighted sum of the tiles; weights halve along a snake path through the board from a corner."""
    total, weight = 0.0, 1.0
    for number, row in enumerate(board):
        for tile in row if number % 2 == 0 else row[::-1]:
            total += weight * tile
            weight /= 2
    return total


def _greedy_moves(task: dict[str, Any]) -> list[str] | None:
    """Return the moves of `best`, or None if they miss the goal within the move limit."""
    board, moves = _initial_board(task), list[str]()
    while _largest(board) < task["goal"]:
        if not _can_move(board) or len(moves) == task["moves"]:
            return None
        moves.append(best(board))
        board = _spawn(slide(board, moves[-1])[0], task["spawns"], len(moves))
    return moves


def _beam_search(task: dict[str, Any]) -> list[str]:
    """Return the moves of a beam search that knows the tiles that will appear.

    If no path reaches the goal, return the best path so far.
    """
    beam: dict[Board, list[str]] = {_initial_board(task): []}
    moves: list[str] = []
    for number in range(1, task["moves"] + 1):
        successors: dict[Board, list[str]] = {}
        for board, moves in beam.items():
            for move in DIRECTIONS:
                after, _ = slide(board, move)
                if after != board:
                    successors.setdefault(_spawn(after, task["spawns"], number), [*moves, move])
        if not successors:
            break
        beam = {board: successors[board] for board in sorted(successors, key=worth, reverse=True)[:BEAM]}
        board, moves = next(iter(beam.items()))
        if reached := [path for board, path in successors.items() if _largest(board) >= task["goal"]]:
            return reached[0]
    return moves


def _initial_board(task: dict[str, Any]) -> Board:
    empty = ((0,) * task["size"],) * task["size"]
    return _spawn(_spawn(empty, task["spawns"], -1), task["spawns"], 0)


def _spawn(board: Board, spawns: int, number: int) -> Board:
    rng = random.Random(f"{spawns} {number}")
    return _place(board, rng.choice(_empty_cells(board)), 4 if rng.random() < 0.1 else 2)


def _place(board: Board, cell: tuple[int, int], tile: int) -> Board:
    row, column = cell
    changed = (*board[row][:column], tile, *board[row][column + 1 :])
    return (*board[:row], changed, *board[row + 1 :])


def _empty_cells(board: Board) -> list[tuple[int, int]]:
    return [(row, column) for row, tiles in enumerate(board) for column, tile in enumerate(tiles) if not tile]


def _can_move(board: Board) -> bool:
    """Return True if some move changes the board."""
    return any(slide(board, move)[0] != board for move in DIRECTIONS)


def _largest(board: Board) -> int:
    return max(map(max, board))


def board_text(board: Board) -> str:
    return "\n".join(" ".join(str(tile or ".") for tile in row) for row in board)
