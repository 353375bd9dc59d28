"""Tic-tac-toe: rules and game values, strength of the opponents, and success."""

from __future__ import annotations

import pytest

from components.environments.games import tictactoe
from components.environments.games.tictactoe import EMPTY, LEVELS, TicTacToe, _best, _reply, _value, _winner
from components.environments.tools import acts
from tests.environments import checks


@pytest.fixture(scope="module")
def game() -> TicTacToe:
    return TicTacToe()


def free_cells(messages) -> list[str]:
    boards = [line for line in messages[-1]["content"].splitlines() if len(line) == 5 and line[1] == line[3] == " "]
    return [cell for line in boards for cell in line.split() if cell.isdigit()]


def random_move(rng, messages):
    return acts([rng.choice(free_cells(messages))])[0]


def test_chance_wins_less_the_better_the_opponent():
    rates = []
    for difficulty in LEVELS:
        game = TicTacToe(train=150, heldout=1, difficulties=[difficulty])
        rates.append(checks.success_of(game, game.scenarios("train"), random_move, turns=5))
    assert rates[0] > rates[2] > rates[4]
    assert rates[0] < 0.6
    assert rates[4] < 0.2


def test_the_value_of_the_game_is_a_draw():
    """Known results: the game is a draw after any first move; the only reply to a corner is the centre."""
    assert _value(EMPTY) == 0
    assert _best(EMPTY) == list(EMPTY)
    assert _best("X23456789") == ["5"]


def test_a_perfect_opponent_is_never_beaten():
    task = {"mark": "X", "errors": 0.0, "opponent": 1}

    def beaten(board):
        for cell in tictactoe._free(board):
            after, _ = tictactoe._after(board, cell, task)
            assert _winner(after) != "X", after
            if not tictactoe._over(after):
                beaten(after)

    beaten(EMPTY)


def test_the_opponent_errs_at_its_error_rate():
    board = "X23456789"
    for errors in LEVELS.values():
        replies = [_reply(board, {"errors": errors, "opponent": number})[1] for number in range(400)]
        assert sum(reply != "5" for reply in replies) / 400 == pytest.approx(errors * 7 / 8, abs=0.07)


def test_a_draw_is_a_success_only_against_a_perfect_opponent(game):
    for difficulty, aim in ((1, "Win."), (5, "Do not lose.")):
        scenario = next(scenario for scenario in game.scenarios("train") if scenario.difficulty == difficulty)
        assert aim in game.reset(scenario)[1]["content"]
        game.board, game.done = "OXOXXOXOX", True
        assert game.outcome("")["result"] == "draw"
        assert game.outcome("")["progress"] == 0.5
        assert game.outcome("")["success"] is (difficulty == 5)


def test_invalid_moves_change_nothing(game):
    scenario = next(scenario for scenario in game.scenarios("train") if scenario.type == "second")
    game.reset(scenario)
    before = game.board
    taken = str(before.index("X") + 1)
    for action in ("", "0", "10", "center", taken, "5 6", "１"):
        (observation,) = game.step(acts([action])[0]).observation
        assert observation["content"].startswith("error: ")
    assert game.board == before
    assert game.outcome("")["result"] == "open"
    assert game.invalid_actions == 7
