"""Wordle: marks, held-out words, and a solver that finds every word."""

from __future__ import annotations

from collections import Counter

import pytest

from components.environments.games.wordle import LEVELS, Wordle, _words_of, marks, words
from components.environments.tools import acts
from tests.environments import checks


@pytest.fixture(scope="module")
def wordle() -> Wordle:
    return Wordle()


def test_the_list_is_of_five_letters_each_and_none_twice():
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in words())
    assert len(set(words())) == len(words()) > 600
    assert list(words()) == sorted(words())


def test_marks(subtests):
    for guess, word, expected in [
        ("crane", "crane", "+++++"),
        ("crane", "light", "-----"),
        ("least", "steal", "?????"),
        ("speed", "erase", "?-??-"),  # two e in the guess and in the word
        ("eerie", "enemy", "+?---"),  # three e in the guess, two in the word: the one in place takes the first
        ("allow", "llama", "?+?--"),
        ("geese", "these", "--+++"),  # the two that are in place leave none for the other
    ]:
        with subtests.test(word=word):
            assert marks(guess, word) == expected


def test_difficulties_are_harder_for_the_solver_and_chance_finds_nothing():
    lengths = []
    for difficulty in LEVELS:
        wordle = Wordle(train=30, heldout=1, difficulties=[difficulty])
        scenarios = wordle.scenarios("train")
        lengths.append(sum(len(wordle.solve(scenario)) for scenario in scenarios) / len(scenarios))
        guessed = checks.success_of(wordle, scenarios, lambda rng, _: acts([rng.choice(words())])[0], turns=8)
        assert guessed < 0.1
    assert lengths[:4] == sorted(lengths[:4])  # the fifth gives fewer guesses to as hard a word


def test_no_word_is_in_both_splits():
    assert not set(_words_of("train")) & set(_words_of("heldout"))
    assert len(_words_of("train")) + len(_words_of("heldout")) == len(words())
    for seed in (0, 1):
        wordle = Wordle(seed)
        for split in checks.SPLITS:
            assert {scenario.input["word"] for scenario in wordle.scenarios(split)} <= set(_words_of(split))


def test_letters_are_shown_by_difficulty(wordle):
    for scenario in wordle.scenarios("train"):
        shown = scenario.input["shown"]
        assert all(a in ("_", b) for a, b in zip(shown, scenario.input["word"], strict=True))
        assert 5 - Counter(shown)["_"] == LEVELS[scenario.difficulty][1]
        assert (scenario.type == "repeated") == (len(set(scenario.input["word"])) < 5)


def test_observations_and_outcome(wordle):
    scenario = next(scenario for scenario in wordle.scenarios("train") if scenario.difficulty == 4)
    word = scenario.input["word"]
    almost = word[:4] + ("q" if word[4] != "q" else "z")
    steps = checks.play(wordle, scenario, acts([almost.upper(), word]))
    assert steps[0].observation[0]["content"].endswith(f"{almost[4]}-, 5 guesses left")
    assert steps[0].info["progress"] == 0.8
    assert steps[1].info == {"invalid_actions": 0, "success": True, "progress": 1.0, "guesses": 2}
    lost = checks.play(wordle, scenario, acts(["qqqqq"] * 9))
    assert len(lost) == 6
    assert lost[-1].done


def test_invalid_words_are_not_counted(wordle):
    scenario = wordle.scenarios("train")[0]
    steps = checks.play(wordle, scenario, acts(["", "four", "sixsix", "12345", "straße"[:5], "crane crane"]))
    assert steps[-1].info["invalid_actions"] == 6
    assert steps[-1].info["guesses"] == 0
    listed = Wordle(listed=True)
    steps = checks.play(listed, scenario, acts(["zzzzz", "crane"]))
    assert steps[0].observation[0]["content"] == "error: no word zzzzz in the list"
    assert steps[-1].info["guesses"] == 1
