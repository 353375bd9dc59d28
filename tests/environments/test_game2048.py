"""2048: rules, reproducible tiles, and a solver that reaches the goals."""

from __future__ import annotations

import pytest

from components.environments.games import game2048
from components.environments.games.game2048 import DIRECTIONS, LEVELS, Game2048, best, slide
from components.environments.tools import acts
from components.trajectories.schema import Scenario
from tests.environments import checks

TASK = {"size": 3, "goal": 16, "moves": 12, "spawns": 5}
SCENARIO = Scenario("small", TASK, "train", "3x3", 1)


@pytest.fixture(scope="module")
def game() -> Game2048:
    return Game2048()


def of(game, difficulty, count):
    return [scenario for scenario in game.scenarios("train") if scenario.difficulty == difficulty][:count]


def test_tiles_slide_and_merge(subtests):
    for row, after, merged in [
        ((0, 2, 0, 2), (4, 0, 0, 0), 4),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),  # the two nearest to the side merge
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),  # what has merged does not merge again
        ((8, 4, 2, 0), (8, 4, 2, 0), 0),
        ((0, 0, 0, 2), (2, 0, 0, 0), 0),
    ]:
        with subtests.test(row=row):
            zeros = ((0,) * 4,) * 3
            turned = tuple(zip(row, *zeros, strict=True))
            assert slide((row, *zeros), "left") == ((after, *zeros), merged)
            assert slide((row[::-1], *zeros), "right") == ((after[::-1], *zeros), merged)
            assert slide(turned, "up") == (tuple(zip(after, *zeros, strict=True)), merged)
            assert slide(turned[::-1], "down") == (tuple(zip(after, *zeros, strict=True))[::-1], merged)


def test_a_tile_appears_after_each_move_and_follows_from_it(game):
    scenario = of(game, 4, 1)[0]
    actions = game.solve(scenario)
    boards = []
    for _ in range(2):
        game.reset(scenario)
        history = [game.board]
        for action in actions:
            before = sum(map(sum, game.board))
            game.step(action)
            assert sum(map(sum, game.board)) - before in (2, 4)
            history.append(game.board)
        boards.append(history)
    assert boards[0] == boards[1]
    assert sum(tile > 0 for row in boards[0][0] for tile in row) == 2
    tiles = [max(map(max, game2048._spawn(((0, 0), (0, 0)), number, 1))) for number in range(1000)]
    assert tiles.count(4) / 1000 == pytest.approx(0.1, abs=0.03)


def test_the_solver_reaches_the_goal(game, subtests):
    for difficulty in [1, 2, 3]:
        with subtests.test(difficulty=difficulty):
            for scenario in of(game, difficulty, 40):
                assert checks.solved(game, scenario)


def test_the_solver_reaches_large_goals(game, subtests):
    for difficulty in [4, 5]:
        with subtests.test(difficulty=difficulty):
            for scenario in of(game, difficulty, 2):
                assert checks.solved(game, scenario)


def test_the_solver_uses_the_known_tiles_if_greedy_moves_fail(game):
    """In some scenarios the greedy moves, which do not know the next tiles, fail."""
    lost = [scenario for scenario in of(game, 2, 100) if game2048._greedy_moves(scenario.input) is None]
    assert 0 < len(lost) < 30
    assert all(checks.solved(game, scenario) for scenario in lost)


def test_random_moves_rarely_reach_large_goals():
    def random_move(rng, messages):
        return acts([rng.choice(DIRECTIONS)])[0]

    rates = []
    for difficulty, (_, _, moves) in LEVELS.items():
        game = Game2048(train=40, heldout=1, difficulties=[difficulty])
        rates.append(checks.success_of(game, game.scenarios("train"), random_move, turns=2 * moves))
    assert rates[0] < 0.7
    assert rates[1] < 0.4
    assert max(rates[2:]) < 0.2


def test_rewards_are_merges_and_add_up_to_about_one(game):
    scenario = of(game, 3, 1)[0]
    steps = checks.play(game, scenario, game.solve(scenario))
    assert sum(step.reward for step in steps) == pytest.approx(1, abs=0.25)
    assert steps[-1].info["success"] is True
    assert steps[-1].info["progress"] == 1
    assert steps[-1].info["largest"] == 64
    progress = [step.info["progress"] for step in steps]
    assert progress == sorted(progress)


def test_a_move_that_changes_nothing_is_not_counted(game):
    game.reset(SCENARIO)
    game.board = ((2, 4, 0), (4, 2, 0), (0, 0, 0))
    for action in ("left", "up", "north", "", "left left", "LEFT"):
        step = game.step(acts([action])[0])
        assert step.observation[0]["content"].startswith("error: ")
        assert step.reward == 0
    assert step.info == {
        "invalid_actions": 6,
        "success": False,
        "progress": pytest.approx(1 / 3),
        "largest": 4,
        "moves": 0,
    }


def test_it_ends_when_nothing_moves_and_when_the_moves_are_used_up(game):
    game.reset(SCENARIO)
    game.board = ((2, 4, 2), (4, 2, 4), (2, 4, 2))
    assert not game2048._can_move(game.board)
    game.board = ((8, 4, 8), (4, 2, 4), (8, 4, 0))  # whichever tile appears and however it slides
    step = game.step(acts(["right"])[0])
    assert step.done or game2048._can_move(game.board)
    steps = checks.play(game, Scenario("short", {**TASK, "moves": 2}, "train"), acts([*DIRECTIONS] * 2))
    assert steps[-1].done
    assert steps[-1].info["moves"] == 2


def test_the_best_move_keeps_the_largest_in_its_corner():
    assert best(((128, 64, 32, 16), (2, 4, 8, 8), (0, 0, 2, 4), (0, 0, 0, 2))) in ("left", "right")
