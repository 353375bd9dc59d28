"""TextCraft: consistent recipes, valid plans, and commands."""

from __future__ import annotations

import json
import re

import pytest

from components.environments.games.textcraft import (
    LEVELS,
    MOST,
    TextCraft,
    _goals,
    _ingredients,
    depth,
    plan,
    raw_items,
    recipes,
)
from components.environments.tools import acts
from components.trajectories.schema import Scenario
from tests.environments import checks


@pytest.fixture(scope="module")
def craft() -> TextCraft:
    return TextCraft()


LADDER = Scenario("ladder", {"item": "oak ladder", "count": 4, "listed": ["oak planks", "oak stick"]}, "train")


def answers_of(craft, *actions, scenario=LADDER):
    steps = checks.play(craft, scenario, acts(actions))
    return [step.observation[0]["content"] for step in steps], steps[-1]


def test_recipes_fit_together():
    assert len(recipes()) > 300
    assert not raw_items() & set(recipes())
    assert {"coal", "oak log", "iron ore", "string"} <= raw_items()
    assert max(map(depth, recipes())) == max(LEVELS)
    for recipe in recipes().values():
        assert depth(recipe.item) == 1 + max(map(depth, recipe.needs))  # and so there is no circle


def test_plans_work_for_every_item():
    """Execute each plan on plain counts; no plan crafts more often than necessary."""
    for item in recipes():
        for count in (1, 3, 7):
            raw, crafts = plan(item, count)
            have = dict(raw)
            for recipe, times in crafts:
                for part, each in recipe.needs.items():
                    have[part] -= each * times
                    assert have[part] >= 0, (item, part)
                have[recipe.item] = have.get(recipe.item, 0) + recipe.makes * times
            assert have.pop(item) >= count
            assert all(have[name] == 0 for name in raw)
            assert all(remainder < recipes()[name].makes for name, remainder in have.items() if name in recipes())


def test_random_commands_rarely_succeed_and_deeper_goals_take_longer():
    def random_command(rng, messages):
        """Return a random listed recipe, or one of its raw ingredients."""
        listed = [line for line in messages[1]["content"].splitlines() if line.startswith("craft")]
        parts = {re.sub(r"^\d+ ", "", part) for line in listed for part in line.partition(" using ")[2].split(", ")}
        get = f"get {rng.randint(1, 9)} {rng.choice(sorted(parts & raw_items()))}"
        return acts([rng.choice(listed) if rng.random() < 0.5 else get])[0]

    rates, lengths = [], []
    for difficulty in LEVELS:
        craft = TextCraft(train=40, heldout=1, difficulties=[difficulty])
        scenarios = craft.scenarios("train")
        rates.append(checks.success_of(craft, scenarios, random_command, turns=15))
        lengths.append(sum(len(craft.solve(scenario)) for scenario in scenarios) / len(scenarios))
    assert lengths == sorted(lengths)
    assert rates[1] < 0.4
    assert max(rates[2:]) < 0.05


def test_goals_of_the_splits_are_different_items(craft):
    for level in LEVELS:
        goals = [{item for item, _ in _goals(split)[level]} for split in checks.SPLITS]
        assert not goals[0] & goals[1]
        assert all(goals)
    for scenario in craft.scenarios("heldout"):
        assert depth(scenario.input["item"]) == scenario.difficulty


def test_needed_recipes_are_listed_among_others(craft):
    for scenario in craft.scenarios("train")[:50]:
        needed = {item for item in _ingredients(scenario.input["item"]) if item in recipes()}
        listed = scenario.input["listed"]
        assert needed < set(listed)
        assert len(listed) == len(needed) + LEVELS[scenario.difficulty]
        text = craft.reset(scenario)[1]["content"]
        assert all(str(recipes()[item]) in text for item in listed)


def test_commands(craft):
    answers, step = answers_of(
        craft,
        "inventory",
        "get 4 oak log",
        "craft 8 oak planks using 2 oak log",
        "CRAFT 8 Oak  Planks using 2 oak log",
        "craft 14 oak stick using 14 oak planks",
        "inventory",
        "craft 6 oak ladder using 14 oak stick",
    )
    assert answers == [
        "nothing",
        "got 4 oak log",
        "crafted 8 oak planks",
        "crafted 8 oak planks",
        "crafted 14 oak stick",
        "2 oak planks, 14 oak stick",
        "crafted 6 oak ladder",
    ]
    assert step.done
    assert step.info == {"invalid_actions": 0, "success": True, "progress": 1.0}


def test_invalid_commands_are_explained_and_change_nothing(craft, subtests):
    for command, answer in [
        ("get 2 oak planks", "oak planks must be crafted"),
        ("get 2 unicorn", "no item unicorn"),
        ("get 0 oak log", "expected NUMBER ITEM, found '0 oak log'"),
        ("get 1000 oak log", "expected NUMBER ITEM, found '1000 oak log'"),
        (f"get {MOST} oak log", f"there is room for {MOST} oak log"),
        ("get oak log", "expected NUMBER ITEM"),
        ("craft 3 oak planks using 1 oak log", "that is not the recipe of oak planks"),
        ("craft 4 oak planks using 2 oak log", "that is not the recipe of oak planks"),
        ("craft 4 oak planks using 1 birch log", "that is not the recipe of oak planks"),
        ("craft 4 oak planks using 1 oak log, 1 oak log", "that is not the recipe of oak planks"),
        ("craft 4 oak planks using ", "a command is"),
        ("craft 4 unicorn using 1 oak log", "no recipe makes unicorn"),
        ("craft 4 oak planks", "a command is"),
        ("craft 8 oak planks using 2 oak log", "1 oak log lacking"),
        ("open door", "a command is"),
        ("", "a command is"),
    ]:
        with subtests.test(command=command):
            answers, step = answers_of(craft, "get 1 oak log", command)
            assert answers[1].startswith(f"error: {answer}")
            assert craft.items == {"oak log": 1}
            assert step.info == {"invalid_actions": 1, "success": False, "progress": 0.0}


def test_progress_is_the_share_of_the_needed_kinds(craft):
    _, step = answers_of(craft, "get 1 oak log", "craft 4 oak planks using 1 oak log")
    assert step.info["progress"] == pytest.approx(1 / 3)
    # items that are not needed do not count as progress
    _, step = answers_of(craft, "get 1 birch log", "craft 4 birch planks using 1 birch log")
    assert step.info["progress"] == 0


def test_long_commands_are_answered_in_few_words(craft):
    answers, _ = answers_of(craft, "craft 4 oak planks using " + "1 oak log," * 100_000, "get 1 " + "a" * 1_000_000)
    assert all(len(answer) < 200 for answer in answers)
    assert len(json.dumps(craft.save())) < 200
