"""Arithmetic: true steps, splits without a common calculation, and the answers that count."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.environments.worlds.arithmetic import LARGEST, LEVELS, Arithmetic, split_of
from tests.environments import checks


@pytest.fixture(scope="module")
def arithmetic() -> Arithmetic:
    return Arithmetic()


def message(text: str) -> dict:
    return {"role": "assistant", "content": text}


def outcome(arithmetic: Arithmetic, scenario, text: str) -> dict:
    (step,) = checks.play(arithmetic, scenario, [message(text)])
    assert step.done
    return step.info


def calculation(scenario) -> str:
    """Return the numbers and operations of the question's solution."""
    first, *_ = scenario.input["steps"]
    return " ".join([first.split()[0], *(" ".join(step.split()[1:3]) for step in scenario.input["steps"])])


def test_the_solver_solves_everything(subtests):
    for seed in [0, 17]:
        with subtests.test(seed=seed):
            arithmetic = Arithmetic(seed)
            for split in checks.SPLITS:
                for scenario in arithmetic.scenarios(split):
                    (solution,) = arithmetic.solve(scenario)
                    expected = {"success": True, "progress": 1.0, "answered": True, "invalid_actions": 0}
                    assert outcome(arithmetic, scenario, solution["content"]) == expected
                    assert len(solution["content"].splitlines()) == scenario.difficulty + 1


def test_guesses_rarely_succeed(arithmetic):
    """A random legal action, and the most frequent answer."""
    scenarios = Arithmetic(train=600, heldout=1).scenarios("train")
    chance = checks.success_of(
        arithmetic, scenarios, lambda draw, _: message(draw.choice(arithmetic.legal_actions())), turns=1
    )
    assert chance < 0.03
    (_, most_frequent), *_ = Counter(scenario.input["answer"] for scenario in scenarios).most_common(1)
    assert most_frequent / len(scenarios) < 0.06


@given(st.integers(), st.sampled_from(LEVELS), st.sampled_from(checks.SPLITS))
def test_the_steps_are_true_and_follow_the_question(seed, level, split):
    _, task = Arithmetic.task(random.Random(seed), level, split)
    numbers = re.findall(r"\d+", task["question"])
    value = numbers[0]
    assert len(task["steps"]) == level == len(numbers) - 1
    for step, number in zip(task["steps"], numbers[1:], strict=True):
        left, result = step.split(" = ")
        assert left.split()[0::2] == [value, number]
        assert eval(left) == int(result)
        assert 2 <= int(result) <= LARGEST
        value = result
    assert task["answer"] == value
    assert task["question"].count("How many") == 1


def test_splits_of_all_seeds_share_no_calculation():
    by_split = {split: set() for split in checks.SPLITS}
    for seed in range(3):
        for split in checks.SPLITS:
            for scenario in Arithmetic(seed, train=300, heldout=100).scenarios(split):
                by_split[split].add(calculation(scenario))
    assert not by_split["train"] & by_split["heldout"]
    assert split_of(12, [("+", 5)]) == split_of(12, [("+", 5)])
    shares = Counter(split_of(start, [("+", number)]) for start in range(2, 60) for number in range(2, 40))
    assert 0.15 < shares["heldout"] / shares.total() < 0.25


def test_difficulties(arithmetic):
    assert {scenario.difficulty for scenario in arithmetic.scenarios("train")} == set(LEVELS)
    assert {scenario.difficulty for scenario in Arithmetic(difficulties=[1, 6]).scenarios("heldout")} == {1, 6}
    with pytest.raises(ValueError, match="expected one or more of"):
        Arithmetic(difficulties=[7])


def test_there_are_more_problems_than_a_small_run_needs():
    assert len(Arithmetic(train=20_000, heldout=2_000, difficulties=[1]).scenarios("train")) == 20_000


def test_the_last_final_answer_counts(arithmetic):
    scenario = next(scenario for scenario in arithmetic.scenarios("train") if scenario.difficulty == 3)
    answer, steps = scenario.input["answer"], scenario.input["steps"]
    assert outcome(arithmetic, scenario, f"####{answer}")["success"]
    assert outcome(arithmetic, scenario, f"#### 1\n#### {answer}.")["success"]
    for wrong in (answer, f"The answer is {answer}.", f"#### {answer}\n#### 1", f"#### {answer}5", f"#### -{answer}"):
        assert not outcome(arithmetic, scenario, wrong)["success"]
    assert not outcome(arithmetic, scenario, f"#### {'9' * 10_000}")["answered"]
    assert outcome(arithmetic, scenario, f"{steps[0]}\n{steps[1].replace(' ', '')}")["progress"] == pytest.approx(2 / 3)
    assert outcome(arithmetic, scenario, steps[1])["progress"] == 0
