"""Maze navigation with full or partial observation.

A maze is a square of cells with walls between some of them. The agent moves `up`, `down`, `left` or `right` (`move up`
also works). The observation depends on the type of the scenario:

- map: the whole maze as text;
- position: the agent's position, the goal's position, and the walls around the agent;
- walls: only the walls around the agent.

A move against a wall is invalid and counts as a move. A `map` scenario allows twice the moves of the shortest path; the
others allow as many as a search of every cell takes. The outcome's `progress` is the share of the shortest path that
the agent has completed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from components.environments.seeded import GeneratedGame
from components.environments.tools import InvalidAction, acts
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LEVELS = {1: (3, "map"), 2: (5, "map"), 3: (4, "position"), 4: (6, "position"), 5: (6, "walls")}
"""Side length in cells and observation type, by difficulty."""
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
BACK = {"up": "down", "down": "up", "left": "right", "right": "left"}
DOORS = 0.1
"""Share of the walls that are opened in addition to the spanning tree, so that there are several paths."""

Cell = tuple[int, int]
"""Row and column, from 0."""


@registered("environment.maze")
class Maze(GeneratedGame):
    """seed: generator seed. train, heldout: scenarios of the two splits. difficulties: used in rotation.

    Scenario types: map, position, walls. Difficulty: see LEVELS.
    """

    saved = ("at", "moves")

    name = "maze"
    system = "Find the way to the goal. Give one move, alone: up, down, left or right."

    @staticmethod
    def task(rng: random.Random, difficulty: int, split: str) -> tuple[str, dict[str, Any]]:
        size, kind = LEVELS[difficulty]
        rows = _generate_maze(rng, size)
        cells = [(row, column) for row in range(size) for column in range(size)]
        start = rng.choice(cells)
        far = distances(rows, start)
        goal = max(rng.sample(cells, len(cells)), key=lambda cell: far[cell])
        moves = 2 * far[goal] if kind == "map" else 2 * len(cells)
        return kind, {"rows": rows, "start": list(start), "goal": list(goal), "moves": moves}

    def begin(self, scenario: Scenario) -> str:
        self.rows, self.goal = scenario.input["rows"], _cell(scenario.input["goal"])
        self.at = _cell(scenario.input["start"])
        self.distances = distances(self.rows, self.goal)
        self.moves = 0
        legend = "# is a wall, A is you, G the goal.\n" if scenario.type == "map" else ""
        return f"{legend}You have {scenario.input['moves']} moves.\n{self._view()}"

    def act(self, action: str) -> str:
        move = action.lower().removeprefix("move ")
        if move not in MOVES:
            raise InvalidAction(f"a move is one of {', '.join(MOVES)}")
        self.moves += 1
        wall = not _is_open(self.rows, self.at, move)
        if not wall:
            self.at = _next(self.at, move)
        remaining = self.scenario.input["moves"] - self.moves
        self.done = self.at == self.goal or remaining == 0
        if wall:
            raise InvalidAction(f"there is a wall, {remaining} moves left")
        return "You are at the goal." if self.at == self.goal else f"{self._view()}\n{remaining} moves left"

    def legal_actions(self) -> list[str]:
        return [move for move in MOVES if _is_open(self.rows, self.at, move)]

    def outcome(self, answer: str) -> dict[str, Any]:
        ahead = self.distances[self.at] / self.distances[_cell(self.scenario.input["start"])]
        return {"success": self.at == self.goal, "progress": max(0.0, 1 - ahead), "moves": self.moves}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the shortest path if the map is shown; else a search that knows only what the agent observes."""
        rows, start, goal = scenario.input["rows"], _cell(scenario.input["start"]), _cell(scenario.input["goal"])
        if scenario.type == "map":
            return acts(shortest_moves(rows, start, goal))
        return acts(search_moves(rows, start, goal, sees_goal=scenario.type == "position"))

    def _view(self) -> str:
        if self.scenario.type == "map":
            marked = [list(row) for row in self.rows]
            marked[2 * self.goal[0] + 1][2 * self.goal[1] + 1] = "G"
            marked[2 * self.at[0] + 1][2 * self.at[1] + 1] = "A"
            return "\n".join("".join(row) for row in marked)
        walls = [move for move in MOVES if not _is_open(self.rows, self.at, move)]
        walls_text = f"Walls: {', '.join(walls) or 'none'}."
        if self.scenario.type == "walls":
            return walls_text
        return f"You are at {_cell_text(self.at)}, the goal is at {_cell_text(self.goal)}. {walls_text}"


def distances(rows: Sequence[str], goal: Cell) -> dict[Cell, int]:
    """Return the number of moves to the goal, by cell."""
    distance, queue = {goal: 0}, deque([goal])
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            neighbour = _next(cell, move)
            if _is_open(rows, cell, move) and neighbour not in distance:
                distance[neighbour] = distance[cell] + 1
                queue.append(neighbour)
    return distance


def shortest_moves(rows: Sequence[str], start: Cell, goal: Cell) -> list[str]:
    """Return the moves of a shortest path."""
    ahead, at, moves = distances(rows, goal), start, []
    while at != goal:
        options = [move for move in MOVES if _is_open(rows, at, move)]
        moves.append(min(options, key=lambda move: ahead[_next(at, move)]))
        at = _next(at, moves[-1])
    return moves


def search_moves(rows: Sequence[str], start: Cell, goal: Cell, *, sees_goal: bool) -> list[str]:
    """Return the moves of a depth-first search: to an unvisited cell if there is one, else back.

    sees_goal: prefer the unvisited cell nearest to the goal.
    """
    at, visited, moves, trail = start, {start}, list[str](), list[str]()
    while at != goal:
        options = [move for move in MOVES if _is_open(rows, at, move) and _next(at, move) not in visited]
        if options:
            move = min(options, key=lambda move: _manhattan(_next(at, move), goal)) if sees_goal else options[0]
            trail.append(move)
        else:
            move = BACK[trail.pop()]
        at = _next(at, move)
        visited.add(at)
        moves.append(move)
    return moves


def _generate_maze(rng: random.Random, size: int) -> list[str]:
    """Return a maze as text: cell (r, c) is at row 2r + 1, column 2c + 1; between cells is a space or a wall, `#`."""
    grid = [["#"] * (2 * size + 1) for _ in range(2 * size + 1)]
    trail = [(rng.randrange(size), rng.randrange(size))]
    visited = set(trail)
    while trail:
        row, column = trail[-1]
        grid[2 * row + 1][2 * column + 1] = " "
        options = [
            (down, right)
            for down, right in MOVES.values()
            if 0 <= row + down < size and 0 <= column + right < size and (row + down, column + right) not in visited
        ]
        if not options:
            trail.pop()
            continue
        down, right = rng.choice(options)
        grid[2 * row + 1 + down][2 * column + 1 + right] = " "
        trail.append((row + down, column + right))
        visited.add(trail[-1])
    for row in range(1, 2 * size):
        for column in range(1 + row % 2, 2 * size, 2):
            if rng.random() < DOORS:
                grid[row][column] = " "
    return ["".join(row) for row in grid]


def _is_open(rows: Sequence[str], cell: Cell, move: str) -> bool:
    down, right = MOVES[move]
    return rows[2 * cell[0] + 1 + down][2 * cell[1] + 1 + right] != "#"


def _next(cell: Cell, move: str) -> Cell:
    down, right = MOVES[move]
    return cell[0] + down, cell[1] + right


def _manhattan(first: Cell, second: Cell) -> int:
    return abs(first[0] - second[0]) + abs(first[1] - second[1])


def _cell(pair: Sequence[int]) -> Cell:
    return pair[0], pair[1]


def _cell_text(cell: Cell) -> str:
    return f"row {cell[0] + 1}, column {cell[1] + 1}"
