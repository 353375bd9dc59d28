"""Questions over worlds: comparison of answers by value, and solvability with the tools."""

from __future__ import annotations

import json
import random

import pytest

from components.environments.tools import call
from components.environments.worlds.questions.base import LEVELS, same
from components.environments.worlds.questions.movie import Movie
from components.environments.worlds.questions.todo import Todo
from components.environments.worlds.questions.weather import Weather
from tests.environments import checks

WORLDS = {"todo": Todo, "weather": Weather, "movie": Movie}
each_world = pytest.mark.parametrize("kind", WORLDS.values(), ids=WORLDS)


@each_world
def test_every_question_can_be_answered(kind, subtests):
    for seed in [0, 3]:
        with subtests.test(seed=seed):
            environment = kind(seed, train=200, heldout=60)
            for scenario in [*environment.scenarios("train"), *environment.scenarios("heldout")]:
                steps = checks.play(environment, scenario, environment.solve(scenario))
                assert steps[-1].info == {"invalid_actions": 0, "success": True, "submitted": True}
                assert len(scenario.input["question"]) < 300


@each_world
def test_random_actions_fail(kind):
    environment = kind(train=200, heldout=20)
    tools = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in environment.tools()}

    def chance(draw: random.Random, messages: list[dict]) -> dict:
        text = " ".join(message["content"] or "" for message in messages[1:])
        words = [word.strip('".,:;{}[]()?') for word in text.split()]
        name = draw.choice(sorted(tools))
        arguments = {key: draw.choice([*schema.get("enum", []), *words]) for key, schema in tools[name].items()}
        return call(name, arguments)

    assert checks.success_of(environment, environment.scenarios("train"), chance, turns=10) < 0.05
    for guess in ("0", "1", "2", "3"):
        scenarios = environment.scenarios("train")
        right_guesses = [scenario for scenario in scenarios if same(guess, scenario.input["answer"])]
        assert len(right_guesses) / 200 < 0.12


@each_world
def test_every_form_and_difficulty_occurs_and_difficulty_is_the_number_of_calls(kind):
    environment = kind(train=400, heldout=100)
    for split in checks.SPLITS:
        scenarios = environment.scenarios(split)
        assert {scenario.type for scenario in scenarios} == set(kind.forms())
        assert {scenario.difficulty for scenario in scenarios} == {1, 2, 3, 4, 5}
    for scenario in scenarios:
        calls = len(environment.solve(scenario)) - 1
        assert scenario.difficulty == 1 + sum(calls > most for most in LEVELS)
    worlds = [{scenario.input["world"] for scenario in environment.scenarios(split)} for split in checks.SPLITS]
    assert not worlds[0] & worlds[1]


@each_world
def test_the_first_messages_do_not_contain_the_answer(kind):
    environment = kind(train=100, heldout=20)
    for scenario in environment.scenarios("train"):
        first = " ".join(message["content"] for message in environment.reset(scenario))
        answer = scenario.input["answer"]
        if isinstance(answer, str) and not answer.isdigit() and len(answer) > 8:
            assert answer not in first.partition("names with commas between.")[2] or scenario.type == "warmest"


@each_world
def test_random_arguments_are_answered(kind):
    environment = kind(train=8, heldout=8)
    environment.reset(environment.scenarios("train")[0])
    for tool in environment.tools():
        function = tool["function"]
        for value in ("", "x" * 9000, "\ud83d\x00", "2031-99-99", 10**40, None, ["a"]):
            if function["name"] == "submit":
                continue
            arguments = dict.fromkeys(function["parameters"]["properties"], value)
            step = environment.step(call(function["name"], arguments))
            assert len(step.observation[0]["content"]) < 1000
            json.dumps(step.info)
    assert not environment.done


def test_speaking_ends_it_without_an_answer():
    environment = Movie(train=8, heldout=8)
    scenario = environment.scenarios("train")[0]
    answer = str(scenario.input["answer"])
    (step,) = checks.play(environment, scenario, [{"role": "assistant", "content": answer}])
    assert step.done
    assert step.info == {"invalid_actions": 0, "success": False, "submitted": False}


def test_answers_are_compared_by_value(subtests):
    for submitted, right, equal in [
        ("12", 12, True),
        (" 12.0 km/h", 12, False),
        ("12 degrees", 12, True),
        ("-3", -3, True),
        ("12 13", 12, False),
        ("1e999", 12, False),
        ("9" * 500, 12, False),
        ("nan", 12, False),
        ("Vera  gallo.", "Vera Gallo", True),
        ("Vera", "Vera Gallo", False),
        ("2031-03-02", "2031-03-02", True),
        ("b and A", ["A", "b"], True),
        ("A, b, c", ["A", "b"], False),
        ("A, A", ["A", "b"], False),
        ("", ["A"], False),
        ("", "A", False),
    ]:
        with subtests.test(submitted=submitted):
            assert same(submitted, right) is equal


def test_equal_seeds_give_equal_worlds_and_other_seeds_other_worlds():
    first, second, third = Weather(1, 16, 8), Weather(1, 16, 8), Weather(2, 16, 8)
    assert first.scenarios("train") == second.scenarios("train")
    assert [a.input["question"] for a in first.scenarios("train")] != [
        a.input["question"] for a in third.scenarios("train")
    ]


def test_places_with_the_same_name_are_distinguished():
    environment = Weather(train=200, heldout=8)
    shared = [
        scenario
        for scenario in environment.scenarios("train")
        if "region" in scenario.input["question"] and scenario.type != "place"
    ]
    assert shared
    for scenario in shared:
        environment.reset(scenario)
        name = scenario.input["solution"][0][1]["name"]
        places = json.loads(environment.find_places(name))["places"]
        assert len(places) >= 1
