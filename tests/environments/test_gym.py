"""Gymnasium environments: toy-text presets, all kinds of spaces, user functions, configuration errors."""

from __future__ import annotations

import json
import random
import sys

import pytest

from components.environments.adapters.gym import Gym, Move, Variant, frozen_lakes
from components.environments.adapters.gym_presets import View
from components.environments.tools import acts
from components.errors import SpecError
from components.specs import Target
from tests.environments import checks

gymnasium = pytest.importorskip("gymnasium")
np = pytest.importorskip("numpy")

LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "vary": frozen_lakes}
TOYS = {
    "FrozenLake": LAKE,
    "CliffWalking": {"id": "CliffWalking-v1"},
    "Taxi": {"id": "Taxi-v4"},
    "Blackjack": {"id": "Blackjack-v1"},
    "CartPole": {"id": "CartPole-v1"},
}
SOLVED = ("FrozenLake", "CliffWalking", "Taxi")


def small(**arguments) -> Gym:
    return Gym(**{"train": 20, "heldout": 10, **arguments})


def at_random(environment: Gym):
    return lambda rng, messages: acts([rng.choice(environment.names)])[0]


@pytest.mark.parametrize("name", TOYS)
def test_they_satisfy_the_environment_contract(name):
    checks.check(lambda: small(**TOYS[name]), solver=name in SOLVED)


def test_value_iteration_succeeds_and_random_actions_do_not(subtests):
    for name in SOLVED:
        with subtests.test(name):
            environment = small(**TOYS[name])
            for scenario in environment.scenarios("train"):
                assert checks.solved(environment, scenario)
            assert (
                checks.success_of(environment, environment.scenarios("train"), at_random(environment), turns=40) < 0.3
            )


def test_random_actions_without_a_solver(subtests):
    for name, most in [("Blackjack", 0.5), ("CartPole", 0.2)]:
        with subtests.test(name):
            environment = small(**TOYS[name])
            assert (
                checks.success_of(environment, environment.scenarios("train"), at_random(environment), turns=40) <= most
            )
            with pytest.raises(SpecError, match="exposes no transition table, so it cannot be solved"):
                environment.solve(environment.scenarios("train")[0])


def test_larger_lakes_need_more_steps():
    environment = Gym(**LAKE, train=60, heldout=10)
    lengths: dict[int, list[int]] = {}
    for scenario in environment.scenarios("train"):
        lengths.setdefault(scenario.difficulty, []).append(len(environment.solve(scenario)))
    means = [sum(values) / len(values) for _, values in sorted(lengths.items())]
    assert means == sorted(means)
    assert len(means) == 5
    maps = [
        json.dumps(scenario.input["kwargs"]) for split in checks.SPLITS for scenario in environment.scenarios(split)
    ]
    assert len(set(maps)) == 70


def test_optimal_policy_mostly_succeeds_on_slippery_ice():
    environment = Gym(kwargs={"is_slippery": True}, train=50, heldout=1, max_steps=100)
    won = [checks.solved(environment, scenario) for scenario in environment.scenarios("train")]
    assert 0.5 < sum(won) / len(won) < 1.0


def test_observations_and_errors():
    environment = small(id="FrozenLake-v1", kwargs={"is_slippery": False, "desc": ["SFH", "FHF", "FFG"]})
    system, first = environment.reset(environment.scenarios("train")[0])
    assert system["content"].endswith("Each turn, one action: left, down, right, up.")
    assert first["content"] == "AFH\nFHF\nFFG\nYou are in row 1, column 1."
    step = environment.step(acts(["Down."])[0])
    assert step.observation[0]["content"] == "SFH\nAHF\nFFG\nYou are in row 2, column 1.\nReward: 0."
    wrong = environment.step(acts(["jump"])[0])
    assert wrong.observation[0]["content"] == "error: no action 'jump'; there are left, down, right, up"
    assert wrong.info["invalid_actions"] == 1
    for other, says in (
        ("Taxi-v4", "The passenger is at "),
        ("Blackjack-v1", "Your cards sum to "),
        ("CartPole-v1", "Pole at "),
    ):
        toy = small(id=other)
        assert says in toy.reset(toy.scenarios("train")[0])[1]["content"]


class Spaces(gymnasium.Env):
    """Environment with an observation of every kind of space."""

    observation_space = gymnasium.spaces.Dict(
        {
            "place": gymnasium.spaces.Box(-9, 9, (2,)),
            "map": gymnasium.spaces.Box(0, 9, (2, 2), int),
            "note": gymnasium.spaces.Text(20),
            "lives": gymnasium.spaces.Discrete(4),
        }
    )
    action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = np.zeros(2)
        return self.observe(), {}

    def step(self, action):
        self.place = self.place + action
        return self.observe(), float(action.sum()), bool(self.place.sum() > 1.9), False, {}

    def observe(self):
        return {"place": self.place, "map": np.eye(2, dtype=int), "note": "warm", "lives": 3}


def test_numbers_as_actions_and_any_observation():
    environment = small(id="spaces", make=lambda: Spaces(), success=1.9, max_steps=5)
    messages = environment.reset(environment.scenarios("train")[0])
    assert messages[0]["content"] == "You act in spaces. Each turn, one action: 2 numbers, such as 0.5, -1."
    assert messages[1]["content"] == "place: 0 0\nmap: 1 0\n0 1\nnote: warm\nlives: 3"
    for bad in ("", "one, two", "1", "1 2 3", "nan 1", "7 0", "1e999 0", "9" * 100_000):
        assert environment.step(acts([bad])[0]).observation[0]["content"].startswith("error: ")
    assert environment.step(acts(["[0.5, 0.5]"])[0]).info["progress"] == pytest.approx(1 / 1.9)
    assert environment.step(acts(["1 0.25"])[0]).info == {
        "invalid_actions": 8,
        "success": True,
        "return": 2.25,
        "steps": 2,
        "progress": 1.0,
    }


def closer(move: Move, bonus: float = 0.5) -> float:
    return move.reward + bonus * (move.after > move.before)


def place(view: View) -> str:
    return f"state {view.observation} of {view.environment.observation_space.n}"


def same(seed: int) -> Variant:
    return Variant({"map_name": "4x4"})


def test_functions_of_the_user_by_their_paths():
    here = __name__
    sys.modules.setdefault(here, sys.modules[__name__])
    spec = {
        "_target_": "components.environments.adapters.gym.Gym",
        "kwargs": {"is_slippery": False},
        "render": {"_target_": f"{here}.place"},
        "shaping": {"_target_": f"{here}.closer", "bonus": 0.25},
        "train": 2,
        "heldout": 1,
    }
    environment = Target.model_validate(spec, context={"allow": [here.partition(".")[0]]}).build()
    scenario = environment.scenarios("train")[0]
    assert environment.reset(scenario)[1]["content"] == "state 0 of 16"
    assert environment.step(acts(["right"])[0]).reward == 0.25
    step = environment.step(acts(["left"])[0])
    assert step.reward == 0.0
    assert step.info["return"] == 0.0


def test_configuration_errors_are_named(subtests):
    for arguments, says in [
        ({"id": "FrozenLake-v9"}, "environment.id: .*Did you mean 'FrozenLake-v1'"),
        ({"id": "os:FrozenLake-v1"}, "environment.id: gymnasium has no environment"),
        ({"kwargs": {"slippery": True}}, "environment.kwargs: .*slippery"),
        ({"actions": ["a", "b"]}, "environment.actions: names 2 actions .* has 4"),
        ({"actions": ["a", "b", "A.", "c"]}, "each needs a unique name"),
        ({"id": "spaces", "make": lambda: Spaces()}, "environment.success: null: .* has no reward threshold"),
        ({"id": "s", "make": lambda: Spaces(), "success": 1.0, "actions": ["a"]}, "numbers without names"),
    ]:
        with subtests.test(says=says), pytest.raises(SpecError, match=says):
            small(**arguments)


def test_duplicate_scenarios_are_reported():
    with pytest.raises(SpecError, match=r"environment\.vary: returns 1 distinct scenarios"):
        small(vary=same).scenarios("train")
    with pytest.raises(AttributeError, match="kwargs"):
        small(vary=lambda seed: None).scenarios("train")


def test_long_observations_are_truncated():
    environment = small(id="long", make=lambda: Spaces(), success=1.0, render=lambda view: "x" * 100_000)
    assert len(environment.reset(environment.scenarios("train")[0])[1]["content"]) < 4_100


def test_an_episode_depends_on_nothing_but_its_scenario():
    environment, other = small(id="Blackjack-v1"), small(id="Blackjack-v1")
    scenario = environment.scenarios("train")[0]
    first = environment.reset(scenario)
    random.seed(5)
    other.reset(other.scenarios("train")[3])
    assert other.reset(scenario) == first
