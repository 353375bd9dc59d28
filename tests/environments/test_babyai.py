"""BabyAI: text observations, text actions, and the bot as solver."""

from __future__ import annotations

import pytest

from components.environments.adapters.babyai import ACTIONS, BOT_UNSUPPORTED, BabyAI, describe_view
from components.environments.tools import acts
from components.errors import SpecError
from components.trajectories.schema import Scenario
from tests.environments import checks

minigrid = pytest.importorskip("minigrid")

DEFAULT = ["GoToRedBallGrey", "GoToLocal", "PickupLoc", "OpenDoor", "PutNextLocal"]


def small(levels=DEFAULT, **arguments) -> BabyAI:
    return BabyAI(levels, **{"train": 25, "heldout": 10, **arguments})


def texts(environment, scenario, *actions):
    return checks.play(environment, scenario, acts(actions))[-1].observation[0]["content"]


def test_it_satisfies_the_environment_contract():
    checks.check(small)


def test_the_bot_succeeds_and_random_actions_do_not():
    environment = small()
    for scenario in environment.scenarios("train"):
        assert checks.solved(environment, scenario), scenario.id

    def policy(rng, messages):
        return acts([rng.choice([*ACTIONS, "go forward 3"])])[0]

    assert checks.success_of(environment, environment.scenarios("train"), policy, turns=20) < 0.35


@pytest.mark.timeout(1800)
def test_every_level_starts_and_most_are_solved():
    names = sorted(small().registered_levels)
    assert len(names) >= 90
    environment = BabyAI(names, train=len(names), heldout=len(names))
    lost = []
    for scenario in environment.scenarios("train"):
        assert environment.reset(scenario)[1]["content"].startswith("Mission: ")
        assert 1 <= scenario.difficulty <= 5, scenario.type
        if scenario.type in BOT_UNSUPPORTED:
            with pytest.raises(SpecError, match="bot does not support"):
                environment.solve(scenario)
        elif not checks.solved(environment, scenario):
            lost.append(scenario.id)
    assert len(lost) <= 2, lost


def test_difficulty_increases_with_solution_length():
    environment = BabyAI(["GoToRedBall", "UnlockPickup", "BossLevel"], train=30, heldout=3)
    lengths: dict[int, list[int]] = {}
    for scenario in environment.scenarios("train"):
        lengths.setdefault(scenario.difficulty, []).append(len(environment.solve(scenario)))
    means = [sum(values) / len(values) for _, values in sorted(lengths.items())]
    assert len(means) == 3
    assert means == sorted(means)


def place(environment, *things):
    """An empty room of 8 by 8 with these things in it: (class, color, x, y); the agent at 3, 5 looks up."""
    from minigrid.core.grid import Grid

    environment.reset(Scenario("x", {"level": "GoToLocal", "seed": 1}, "train", "GoToLocal"))
    world = environment.world
    world.grid = Grid(8, 8)
    world.grid.wall_rect(0, 0, 8, 8)
    for kind, color, x, y in things:
        world.grid.set(x, y, kind(color))
    world.agent_pos, world.agent_dir, world.carrying = (3, 5), 3, None
    return world


def test_view_is_described():
    from minigrid.core.world_object import Ball, Box, Door, Key

    environment = small()
    world = place(environment, (Ball, "red", 3, 4), (Box, "blue", 1, 3), (Key, "grey", 5, 5), (Door, "green", 3, 0))
    assert describe_view(world) == (
        "You see a red ball right in front of you, a grey key 2 right, a blue box 2 ahead and 2 left, "
        "a closed green door 5 ahead. Walls: 3 left."
    )
    assert "pick up" in ACTIONS
    environment.act("Pick up.")
    assert describe_view(world).endswith("You carry a red ball.")
    assert environment.act("go forward 9").startswith("Something is in the way after 4 steps.\n")
    environment.act("toggle")
    assert "an open green door right in front of you" in describe_view(world)
    world.grid.set(3, 0, Door("red", is_locked=True))
    assert "a locked red door right in front of you" in describe_view(world)


def test_invalid_actions(subtests):
    for action in ["", "jump", "go forward 0", "go forward -1", "go forward 999", "turn left 2", "go " * 50_000]:
        with subtests.test(action=action[:60]):
            environment = small()
            scenario = environment.scenarios("train")[0]
            step = checks.play(environment, scenario, acts([action]))[-1]
            assert step.observation[0]["content"].startswith("error: no action ")
            assert step.info == {"invalid_actions": 1, "success": False, "steps": 0}


def test_episode_ends_after_max_steps():
    environment = small(max_steps=3)
    steps = checks.play(environment, environment.scenarios("train")[0], acts(["turn left"] * 9))
    assert len(steps) == 3
    assert steps[-1].observation[0]["content"].startswith("Out of time")


def test_configuration_errors_are_named():
    with pytest.raises(SpecError, match=r"no BabyAI level 'GoToLocl'.*Did you mean 'GoToLocal'"):
        small(["GoToLocl"])
    with pytest.raises(SpecError, match="is empty; expected at least one level"):
        small([])
