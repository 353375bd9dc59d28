"""TextArena: reproducible games, valid moves of opponents, self-play."""

from __future__ import annotations

import json
import random
import re
import sys

import pytest

from components.environments.adapters.textarena import TextArena, Turn
from components.environments.protocol import Players
from components.environments.tools import acts
from components.errors import ResourceError, SpecError
from tests.environments import checks

pytestmark = pytest.mark.timeout(1800)


def small(games=("TicTacToe-v0", "Nim-v0", "GuessTheNumber-v0"), **arguments) -> TextArena:
    pytest.importorskip("textarena")
    return TextArena(games, **{"train": 6, "heldout": 3, **arguments})


def say(text):
    return {"role": "assistant", "content": text}


def last(turn: Turn) -> str:
    """Choose the last free cell, as a user-defined opponent."""
    return re.findall(r"\[\d\]", turn.transcript.rpartition("Available Moves:")[2])[-1]


def test_it_satisfies_the_environment_contract():
    checks.check(small, few=3, solver=False)
    checks.check(lambda: small(opponent="agent"), few=2, solver=False)


def test_saved_game_resumes():
    for opponent in ("random", "agent"):
        environment, other = small(["TicTacToe-v0"], opponent=opponent), small(["TicTacToe-v0"], opponent=opponent)
        for scenario in environment.scenarios("train"):
            free = re.findall(r"\[\d\]", environment.reset(scenario)[-1]["content"].rpartition("Available Moves:")[2])
            environment.step(acts([free[0]])[0])
            other.restore(scenario, json.loads(json.dumps(environment.save())))
            steps = [environment.step(message) for message in acts(["[9]", "[4]", "[8]"])]
            assert steps == [other.step(message) for message in acts(["[9]", "[4]", "[8]"])]


def test_games_do_not_depend_on_the_global_random_generator():
    games = ["KuhnPoker-v0", "Sokoban-v0", "Minesweeper-v0-small", "FrozenLake-v0-random"]
    random.seed(1)
    first = [small(games).reset(scenario) for scenario in small(games).scenarios("train")]
    random.seed(2)
    before = random.getstate()
    assert [small(games).reset(scenario) for scenario in small(games).scenarios("train")] == first
    assert random.getstate() == before
    assert len({json.dumps(messages) for messages in first}) == len(first)


def test_one_player_game_can_be_won():
    environment = small(["GuessTheNumber-v0"])
    for scenario in environment.scenarios("train"):
        environment.reset(scenario)
        low, high = 1, 20
        for _ in range(10):
            guess = (low + high) // 2
            step = environment.step(say(f"I guess [{guess}]"))
            if step.done:
                break
            low, high = (guess + 1, high) if "higher" in step.observation[0]["content"] else (low, guess - 1)
        assert step.info["success"] is True
        assert step.info["progress"] == 1.0


def test_random_actions_do_not_win_one_player_games():
    environment = small(["Mastermind-v0", "TowerOfHanoi-v0"], train=12)

    def policy(rng, messages):
        return say(rng.choice(["[A B]", "[A C]", "[B C]", "[1 2 3 4]", "[4 3 2 1]", "[2 5 6 1]"]))

    assert checks.success_of(environment, environment.scenarios("train"), policy, turns=8) == 0


def test_opponents_make_no_invalid_move(subtests):
    """An agent that chooses the same way makes none either."""
    for game in [
        "TicTacToe-v0",
        "ConnectFour-v0",
        "KuhnPoker-v0-short",
        "Othello-v0-tiny",
        "Breakthrough-v0-tiny",
        "IteratedRockPaperScissors-v0",
        "UltimateTicTacToe-v0",
        "Nim-v0",
    ]:
        with subtests.test(game=game):
            environment = small([game], train=2, max_steps=12)
            for scenario in environment.scenarios("train"):
                environment.reset(scenario)
                step = None
                for number in range(12):
                    moves = environment.game.candidates()
                    random.Random(number).shuffle(moves)
                    step = environment.step(say(next(move for move in moves if environment.game.allows(move))))
                    if step.done:
                        break
                assert step is not None
                assert step.info["invalid_actions"] == 0
                seat = scenario.input["seat"]
                assert not environment.game._env.state.game_info[1 - seat]["invalid_move"]


def test_difficulty_is_in_the_opponent_and_both_seats_are_played():
    games = small(["TicTacToe-v0"], opponent="first", train=4)
    assert [scenario.input["seat"] for scenario in games.scenarios("train")] == [0, 1, 0, 1]
    environment = small(["TicTacToe-v0"], opponent=last, train=2)
    scenario = environment.scenarios("train")[0]
    steps = checks.play(environment, scenario, acts(["[0]", "[1]", "[2]"]))
    assert steps[-1].info == {
        "invalid_actions": 0,
        "success": True,
        "progress": 1.0,
        "result": "win",
        "steps": 3,
    }
    steps = checks.play(environment, scenario, acts(["[0]", "[8]", "[8]"]))
    assert steps[-1].info["result"] == "loss"  # two invalid moves in a row
    assert steps[-1].info["invalid_actions"] == 2
    assert steps[-1].info["progress"] == 0.0


def test_both_players_have_their_own_conversation():
    environment = small(["TicTacToe-v0"], opponent="agent")
    assert isinstance(environment, Players)
    scenario = environment.scenarios("train")[0]
    talks: dict[int, list] = {0: [], 1: []}
    talks[0] += environment.reset(scenario)
    assert environment.players == ["Player 0", "Player 1"]
    moves = ["[0]", "[3]", "[1]", "[4]", "[2]"]
    for number, move in enumerate(moves):
        assert environment.turn == number % 2
        action = acts([move])[0]
        talks[environment.turn].append(action)
        step = environment.step(action)
        talks[environment.turn] += step.observation
    assert step.done
    assert step.info["players"]["Player 0"] == {"success": True, "progress": 1.0, "result": "win"}
    assert step.info["players"]["Player 1"] == {"success": False, "progress": 0.0, "result": "loss"}
    for player in (0, 1):
        assert [message["role"] for message in talks[player]][:4] == ["system", "user", "assistant", "tool"]
        assert f"You are Player {player} in Tic Tac Toe" in talks[player][1]["content"]
    assert "Player 1 placed their symbol (X) in cell 3" in talks[0][3]["content"]
    assert environment.reset(scenario)[1]["content"] == talks[0][1]["content"]


def test_one_move_per_turn_in_self_play():
    environment = small(["TicTacToe-v0"], opponent="agent")
    environment.reset(environment.scenarios("train")[0])
    calls = [acts(["[0]"])[0]["tool_calls"][0] | {"id": f"c{number}"} for number in (1, 2)]
    environment.step({"role": "assistant", "content": "", "tool_calls": calls})
    assert environment.turn == 1
    step = environment.step(acts(["[4]"])[0])
    assert [message["tool_call_id"] for message in step.observation] == ["c1", "c2"]
    assert step.observation[1]["content"] == "error: one move a turn"


def test_unsupported_games_are_rejected():
    with pytest.raises(SpecError, match=r"no game 'TicTac-v0'.*Did you mean 'TicTacToe-v0'"):
        small(["TicTac-v0"])
    with pytest.raises(SpecError, match="Poker-v0 is not supported: it has more than two players"):
        small(["Poker-v0"])
    with pytest.raises(SpecError, match="Debate-v0 is not supported: it calls a language model"):
        small(["Debate-v0"])
    with pytest.raises(SpecError, match="random does not support Stratego-v0"):
        small(["Stratego-v0"])
    assert small(["Stratego-v0"], opponent="agent")
    if sys.version_info < (3, 12):
        with pytest.raises(SpecError, match="Chess-v0 is not supported: its code does not compile on this Python"):
            small(["Chess-v0"])


def test_missing_word_lists_error_names_the_download(monkeypatch):
    pytest.importorskip("textarena")
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(ResourceError, match=r"Wordle-v0 needs the word lists of NLTK.*nltk.downloader words"):
        small(["Wordle-v0"])
