"""Mixture: scenarios of several environments in turn, each with its own tools and solutions."""

import asyncio

import pytest

from components.environments.games.guess import Guess
from components.environments.mixture import Mixture
from components.environments.worlds.shop import Shop
from components.errors import SpecError
from components.specs import validate
from flows.experiment.spec import ExperimentSpec
from tests.flows.test_online_rl import DATA


def mixture() -> Mixture:
    return Mixture({"shop": Shop(train=3, heldout=2), "guess": Guess(train=5, heldout=2)})


def test_scenarios_alternate_and_are_named_by_their_environment():
    scenarios = asyncio.run(mixture().scenarios("train"))
    assert [scenario.id.partition("/")[0] for scenario in scenarios] == ["shop", "guess"] * 3 + ["guess"] * 2
    own = [*Shop(train=3, heldout=2).scenarios("train"), *Guess(train=5, heldout=2).scenarios("train")]
    assert {scenario.id.partition("/")[2] for scenario in scenarios} == {scenario.id for scenario in own}
    assert {scenario.type.partition("/")[0] for scenario in scenarios} == {"shop", "guess"}


def test_an_episode_has_the_tools_of_its_environment():
    async def tools():
        environment = mixture()
        shop, guess, *_ = await environment.scenarios("train")
        names = []
        for scenario in (shop, guess):
            await environment.reset(scenario)
            names.append([tool["function"]["name"] for tool in await environment.tools()])
        return names

    shop, guess = asyncio.run(tools())
    assert shop == [tool["function"]["name"] for tool in Shop(train=3, heldout=2).tools()]
    assert guess == [tool["function"]["name"] for tool in Guess(train=5, heldout=2).tools()]
    assert shop != guess


def test_its_solutions_succeed():
    async def play():
        environment = mixture()
        outcomes = []
        for scenario in await environment.scenarios("train"):
            await environment.reset(scenario)
            for action in await environment.solve(scenario):
                step = await environment.step(action)
            outcomes.append((step.done, step.info["success"]))
        return outcomes

    assert set(asyncio.run(play())) == {(True, True)}


GUESS = {"_target_": "components.environments.games.guess.Guess"}


def test_mistakes_are_reported(tmp_path, subtests):
    for environments, message in [
        ({}, "expected at least one environment"),
        ({"a/b": GUESS}, "'a/b': expected names such as shop"),
        ({"a": {**GUESS, "trane": 3}}, "environment.environments.a.trane: no such key"),
    ]:
        with subtests.test(message=message):
            environment = {"_target_": "components.environments.mixture.Mixture", "environments": environments}
            with pytest.raises(SpecError) as caught:
                validate(ExperimentSpec, {**DATA, "root": str(tmp_path), "environment": environment})
            assert message in str(caught.value)
