"""Guess a number: binary search always finds it, random guesses rarely do, and every answer is true."""

from __future__ import annotations

import math
import re

import pytest

from components.environments.games.guess import LEVELS, Guess
from components.environments.tools import acts
from tests.environments import checks


@pytest.fixture(scope="module")
def guess() -> Guess:
    return Guess()


def answers_of(guess, scenario, *actions):
    steps = checks.play(guess, scenario, acts(actions))
    return [step.observation[0]["content"] for step in steps], steps[-1]


def test_no_difficulty_allows_fewer_guesses_than_binary_search_needs():
    for numbers, guesses in LEVELS.values():
        assert guesses >= math.ceil(math.log2(numbers + 1))


def test_chance_finds_few_and_fewer_as_they_grow():
    def random_guess(rng, messages):
        low, high, _ = map(int, re.findall(r"\d+", messages[1]["content"]))
        return acts([str(rng.randint(low, high))])[0]

    rates = []
    for difficulty in LEVELS:
        guess = Guess(train=100, heldout=1, difficulties=[difficulty])
        rates.append(checks.success_of(guess, guess.scenarios("train"), random_guess, turns=10))
    assert 0.6 > rates[0] > rates[1] > rates[3]
    assert rates[4] < 0.05


def test_answers_are_true_and_determine_the_progress(guess):
    scenario = guess.scenarios("train")[2]
    low, high, number = (scenario.input[name] for name in ("low", "high", "number"))
    progress = []
    for wrong in (low, high):
        answers, step = answers_of(guess, scenario, str(wrong))
        expected = "higher" if wrong < number else "lower"
        assert answers == [f"{expected}, {scenario.input['guesses'] - 1} guesses left"]
        progress.append(step.info["progress"])
    assert all(0 < share < 0.01 for share in progress)
    answers, step = answers_of(guess, scenario, f"Guess {number}")
    assert answers == [f"{number} is right"]
    assert step.done
    assert step.info == {"invalid_actions": 0, "success": True, "progress": 1.0, "guesses": 1}


def test_the_last_guess_ends_it(guess):
    scenario = next(
        scenario for scenario in guess.scenarios("train") if scenario.input["number"] != scenario.input["low"]
    )
    _, step = answers_of(guess, scenario, *[str(scenario.input["low"])] * 20)
    assert step.done
    assert not step.info["success"]
    assert step.info["guesses"] == scenario.input["guesses"]


def test_invalid_guesses_are_not_counted(guess):
    scenario = guess.scenarios("train")[0]
    outside = str(scenario.input["high"] + 1)
    answers, step = answers_of(guess, scenario, "", "seven", "1.5", "-3", "9" * 5000, "٣", outside)
    assert all(answer.startswith("error: ") for answer in answers)
    assert step.info["invalid_actions"] == 7
    assert step.info["guesses"] == 0
