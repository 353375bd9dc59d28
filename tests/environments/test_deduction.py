"""Deduction: unique solutions, checked by enumeration; true and minimal clues; judgement of answers."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from components.environments.games.deduction import (
    LEVELS,
    WHEN,
    WHO,
    Clue,
    Deduction,
    Entity,
    _names,
    _truth,
    common,
    puzzle,
    sentence,
    where_true,
)
from components.environments.tools import acts
from tests.environments import checks


@pytest.fixture(scope="module")
def deduction() -> Deduction:
    return Deduction()


def of(deduction, difficulty, kind="given"):
    return next(
        scenario
        for scenario in deduction.scenarios("train")
        if (scenario.difficulty, scenario.type) == (difficulty, kind)
    )


def answers(deduction, scenario) -> list[str]:
    """Return the right answers."""
    arguments = deduction.solve(scenario)[-1]["tool_calls"][0]["function"]["arguments"]
    return json.loads(arguments)["action"].removeprefix("answer ").split(", ")


def holds(truth, clue) -> bool:
    """Return True if a clue holds in one case, evaluated directly."""

    def person(entity):
        return truth[entity.category].index(entity.number)

    first, *others = map(person, clue.of)
    hours = [truth[WHEN][person(entity)] for entity in clue.of]
    return {
        "direct": lambda: first == others[0],
        "link": lambda: first == others[0],
        "not": lambda: first != others[0],
        "either": lambda: first in others,
        "before": lambda: hours[0] < hours[1],
        "next": lambda: hours[0] + 1 == hours[1],
    }[clue.kind]()


def every_case(size):
    orders = list(itertools.permutations(range(size)))
    return [(tuple(range(size)), *case) for case in itertools.product(orders, repeat=3)]


def test_a_puzzle_has_one_solution(deduction, subtests):
    """Enumerate all cases, independently of the set representation."""
    for difficulty in [1, 2, 3, 4]:
        with subtests.test(difficulty=difficulty):
            scenario = of(deduction, difficulty)
            clues = puzzle(scenario.input)[0]
            size = LEVELS[difficulty][0]
            fitting = [case for case in every_case(size) if all(holds(case, clue) for clue in clues)]
            assert fitting == [_truth(scenario.input)]


def test_the_sets_are_the_cases_in_which_clues_are_true():
    cases = every_case(3)
    for clue in (
        Clue("direct", (Entity(0, 1), Entity(1, 2))),
        Clue("link", (Entity(1, 0), Entity(3, 2))),
        Clue("not", (Entity(0, 0), Entity(2, 1))),
        Clue("either", (Entity(1, 1), Entity(3, 0), Entity(3, 2))),
        Clue("before", (Entity(0, 0), Entity(3, 1))),
        Clue("next", (Entity(1, 2), Entity(0, 2))),
    ):
        bits = f"{where_true(3, clue):0{len(cases)}b}"
        assert [bit == "1" for bit in bits] == [holds(case, clue) for case in cases]


def test_all_clues_are_true_and_none_is_superfluous(deduction, subtests):
    for difficulty in LEVELS:
        with subtests.test(difficulty=difficulty):
            scenario = of(deduction, difficulty)
            size, _, kinds = LEVELS[difficulty]
            truth = _truth(scenario.input)
            clues = puzzle(scenario.input)[0]
            assert all(holds(truth, clue) and clue.kind in kinds for clue in clues)
            sets = [where_true(size, clue) for clue in clues]
            assert common(size, sets).bit_count() == 1
            for number in range(len(sets)):
                assert common(size, sets[:number] + sets[number + 1 :]).bit_count() > 1


def test_the_solver_answers_everything(deduction):
    for difficulty in (1, 2, 3, 4):
        scenarios = [scenario for scenario in deduction.scenarios("train") if scenario.difficulty == difficulty]
        for scenario in scenarios[:30]:
            assert checks.solved(deduction, scenario)


def test_random_answers_are_rarely_right_and_clues_grow_in_number(deduction):
    def random_answer(rng, messages):
        text = messages[1]["content"]
        names = dict(zip(("Who", "place", "time", "thing"), re.findall(r"\(([^)]*)\)", text), strict=True))
        asked = [re.search("Who|place|time|thing", line)[0] for line in re.findall(r"\d\. (.*)", text)]
        return acts(["answer " + ", ".join(rng.choice(names[category].split(", ")) for category in asked)])[0]

    rates, numbers = [], []
    for difficulty in (1, 2, 4):
        scenarios = [scenario for scenario in deduction.scenarios("train") if scenario.difficulty == difficulty][:60]
        rates.append(checks.success_of(deduction, scenarios, random_answer, turns=1))
        puzzles = [puzzle(scenario.input)[0] for scenario in scenarios]
        numbers.append(sum(map(len, puzzles)) / len(puzzles))
    assert rates[0] < 0.3
    assert rates[1] < 0.15
    assert rates[2] < 0.05
    assert numbers == sorted(numbers)


def test_sentences():
    names = (("Ada", "Ben"), ("hall", "attic"), ("1:00", "2:00"), ("rope", "ring"))
    ada, hall, one_oclock, two_oclock, rope, ring = (
        Entity(*at) for at in ((WHO, 0), (1, 0), (WHEN, 0), (WHEN, 1), (3, 0), (3, 1))
    )
    for clue, words in (
        (Clue("direct", (ada, hall)), "Ada was in the hall."),
        (Clue("link", (hall, one_oclock)), "Whoever was in the hall came at 1:00."),
        (Clue("not", (ada, rope)), "Ada did not have the rope."),
        (Clue("not", (rope, one_oclock)), "Whoever had the rope did not come at 1:00."),
        (Clue("either", (ada, one_oclock, two_oclock)), "Ada came at 1:00 or came at 2:00."),
        (Clue("before", (rope, ada)), "Whoever had the rope came before Ada."),
        (Clue("next", (ada, ring)), "Ada came an hour before whoever had the ring."),
    ):
        assert sentence(names, clue) == words


def test_guests_tell_all_clues_when_they_are_asked(deduction):
    scenario = of(deduction, 4, "interviews")
    first = deduction.reset(scenario)[1]["content"]
    names = _names(scenario.input)
    statements = [deduction.step(acts([f"Ask {name.lower()}"])[0]).observation[0]["content"] for name in names[WHO]]
    sentences = {sentence(names, clue) for clue in deduction.clues}
    assert {line for statement in statements for line in statement.splitlines()} == sentences
    assert not any(statement in first for statement in sentences)
    assert not deduction.done
    scenario_with_clues = of(deduction, 4, "given")
    steps = checks.play(deduction, scenario_with_clues, acts([f"ask {_names(scenario_with_clues.input)[WHO][0]}"]))
    assert steps[0].info["invalid_actions"] == 1


def test_answers_count_one_by_one_and_once(deduction):
    scenario = of(deduction, 3)
    right = answers(deduction, scenario)
    names = _names(scenario.input)
    category = next(part for part in names if right[0] in part)
    wrong = [next(name for name in category if name != right[0]), *right[1:]]
    (step,) = checks.play(deduction, scenario, acts(["answer " + ", ".join(wrong), "answer " + ", ".join(right)]))
    assert step.done
    assert step.info == {"invalid_actions": 0, "success": False, "progress": 3 / 4, "right": 3}
    assert step.observation[0]["content"] == "3 of 4 are right."
    loud = [f"the {answer}".upper() if ":" not in answer else f"at {answer}" for answer in right]
    (step,) = checks.play(deduction, scenario, acts(["Answer: " + ",".join(loud)]))
    assert step.info["success"] is True


def test_invalid_answers_cost_nothing(deduction):
    scenario = of(deduction, 1)
    right = answers(deduction, scenario)
    bad = ["", "answer", "answer " + right[0], "answer nobody, nothing", "answer " + "a," * 100_000, "solve it"]
    steps = checks.play(deduction, scenario, acts([*bad, "answer " + ", ".join(right)]))
    assert steps[-1].info == {"invalid_actions": len(bad), "success": True, "progress": 1.0, "right": 2}
    assert all(len(step.observation[0]["content"]) < 200 for step in steps)
