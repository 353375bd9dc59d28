"""Mazes: reachable cells, true observations, and shortest paths."""

from __future__ import annotations

import heapq

import pytest

from components.environments.games.maze import (
    BACK,
    LEVELS,
    MOVES,
    Maze,
    _is_open,
    _next,
    distances,
    search_moves,
    shortest_moves,
)
from components.environments.tools import acts
from tests.environments import checks


@pytest.fixture(scope="module")
def maze() -> Maze:
    return Maze()


def of(maze, kind):
    return next(scenario for scenario in maze.scenarios("train") if scenario.type == kind)


def random_move(rng, messages):
    return acts([rng.choice(list(MOVES))])[0]


def test_every_cell_can_be_reached_and_walls_have_two_sides(maze):
    for scenario in maze.scenarios("train"):
        rows, size = scenario.input["rows"], LEVELS[scenario.difficulty][0]
        assert {len(rows), *map(len, rows)} == {2 * size + 1}
        assert {*rows[0], *rows[-1], *(row[0] + row[-1] for row in rows)} == {"#", "##"}
        far = distances(rows, tuple(scenario.input["goal"]))
        assert len(far) == size * size
        for cell in far:
            for move in MOVES:
                assert not _is_open(rows, cell, move) or _is_open(rows, _next(cell, move), BACK[move])


def test_the_shortest_way_is_shortest(maze):
    """Compare with Dijkstra on the characters of the text, independently of cells: a move is two characters."""
    for scenario in maze.scenarios("heldout")[:40]:
        rows, start, goal = (scenario.input[name] for name in ("rows", "start", "goal"))
        source, target = ((2 * row + 1, 2 * column + 1) for row, column in (start, goal))
        best, heap = {}, [(0, source)]
        while heap:
            cost, (row, column) = heapq.heappop(heap)
            if (row, column) in best:
                continue
            best[row, column] = cost
            for beside in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
                if rows[beside[0]][beside[1]] != "#":
                    heapq.heappush(heap, (cost + 1, beside))
        assert 2 * len(shortest_moves(rows, tuple(start), tuple(goal))) == best[target]


def test_the_search_uses_only_observed_cells(maze):
    """The moves do not depend on unvisited cells: with a goal elsewhere, they are equal until either goal is found."""
    scenario = of(maze, "walls")
    rows, start = scenario.input["rows"], tuple(scenario.input["start"])
    ways = [search_moves(rows, start, goal, sees_goal=False) for goal in distances(rows, start) if goal != start]
    longest = max(ways, key=len)
    assert all(longest[: len(way)] == way for way in ways)


def test_chance_rarely_arrives_and_larger_mazes_take_longer():
    lengths, rates = [], []
    for difficulty in LEVELS:
        maze = Maze(train=60, heldout=1, difficulties=[difficulty])
        scenarios = maze.scenarios("train")
        lengths.append(sum(len(maze.solve(scenario)) for scenario in scenarios) / len(scenarios))
        rates.append(checks.success_of(maze, scenarios, random_move, turns=80))
    assert lengths[0] < lengths[1] < lengths[3]
    assert lengths[2] < lengths[3]
    assert max(rates) < 0.3
    assert rates[3] + rates[4] < 0.2


def test_observations(maze):
    scenario = of(maze, "map")
    shown = maze.reset(scenario)[1]["content"].splitlines()[2:]
    at, goal = scenario.input["start"], scenario.input["goal"]
    assert shown[2 * at[0] + 1][2 * at[1] + 1] == "A"
    assert shown[2 * goal[0] + 1][2 * goal[1] + 1] == "G"
    assert "\n".join(shown).replace("A", " ").replace("G", " ").splitlines() == scenario.input["rows"]
    for kind, hidden in (("position", ("#",)), ("walls", ("#", "goal is", "row"))):
        scenario = of(maze, kind)
        shown = maze.reset(scenario)[1]["content"]
        assert not any(text in shown for text in hidden)
        start = tuple(scenario.input["start"])
        for move in MOVES:
            assert (move in shown.partition("Walls:")[2]) != _is_open(scenario.input["rows"], start, move)


def test_a_wall_costs_a_move_and_is_counted(maze):
    scenario = of(maze, "position")
    start = tuple(scenario.input["start"])
    wall = next(move for move in MOVES if not _is_open(scenario.input["rows"], start, move))
    steps = checks.play(maze, scenario, acts([f"Move {wall}", "north", ""]))
    remaining = scenario.input["moves"] - 1
    assert steps[0].observation[0]["content"] == f"error: there is a wall, {remaining} moves left"
    assert steps[-1].info == {"invalid_actions": 3, "success": False, "progress": 0.0, "moves": 1}
    assert maze.at == start
    steps = checks.play(maze, scenario, acts([wall] * 200))
    assert len(steps) == scenario.input["moves"]
    assert steps[-1].done


def test_progress_is_the_share_of_the_shortest_way(maze):
    scenario = of(maze, "map")
    steps = checks.play(maze, scenario, maze.solve(scenario))
    assert [step.info["progress"] for step in steps] == pytest.approx(
        [n / len(steps) for n in range(1, len(steps) + 1)]
    )
