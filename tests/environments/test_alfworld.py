"""ALFWorld's form of games, played by the real engine with its planner: kitchens of our own, in our domain and, where
the package alfworld is installed, in ALFWorld's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from components.environments.adapters.alfworld import ALFWorld
from components.environments.adapters.alfworld_game import names
from components.environments.tools import acts
from components.errors import EnvironmentFailed, ResourceError
from tests.environments import alfworld_games, checks

pytestmark = pytest.mark.timeout(1800)
TASKS = ("pick_and_place_simple", "pick_heat_then_place_in_recep")


@pytest.fixture(scope="module", params=["ours", "alfworld"])
def data(request, tmp_path_factory):
    """Return a folder of games."""
    pytest.importorskip("textworld")
    pytest.importorskip("fast_downward")
    logic_texts = {}
    if request.param == "alfworld":
        package = importlib.util.find_spec("alfworld")
        if package is None:
            pytest.skip("alfworld, whose domain is played here too, is not installed")
        logic = Path(package.submodule_search_locations[0]) / "data"
        logic_texts = {"domain": (logic / "alfred.pddl").read_text(), "rules": (logic / "alfred.twl2").read_text()}
    folder = tmp_path_factory.mktemp("data")
    alfworld_games.write(folder, **logic_texts)
    return str(folder)


def trial(data, number):
    """Return the file of a game."""
    return next(Path(data).glob(f"json_2.1.1/*/*/trial_{number}")) / "game.tw-pddl"


def game_of(environment, number):
    """Return the scenario of a game."""
    scenarios = [*environment.scenarios("train"), *environment.scenarios("heldout")]
    return next(scenario for scenario in scenarios if scenario.id.endswith(f"trial_{number}"))


def changed(data, tmp_path, number, **values):
    """Return a copy of the folder with one different game."""
    other = tmp_path / "data"
    alfworld_games.write(other)
    file = trial(other, number)
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return str(other)


def test_it_satisfies_the_environment_contract(data):
    checks.check(lambda: ALFWorld(data), few=2)


def test_scenarios_are_alfworlds_games_with_alternating_tasks(data):
    environment = ALFWorld(data)
    train, heldout = environment.scenarios("train"), environment.scenarios("heldout")
    assert [scenario.type for scenario in train] == [*TASKS, *TASKS]
    assert [scenario.difficulty for scenario in heldout] == [1, 3]
    assert sorted(scenario.id[-1] for scenario in train) == ["0", "1", "2", "3"]
    assert {scenario.input["game"].split("/")[0] for scenario in heldout} == {"valid_unseen"}
    assert {scenario.input["game"].split("/")[0] for scenario in ALFWorld(data, unseen=False).scenarios("heldout")} == {
        "valid_seen"
    }
    assert [scenario.type for scenario in ALFWorld(data, tasks=TASKS[1:]).scenarios("train")] == [TASKS[1]] * 2
    assert ALFWorld(data, train=3).scenarios("train") == train[:3]
    assert (
        len({tuple(scenario.id for scenario in ALFWorld(data, seed=seed).scenarios("train")) for seed in range(8)}) > 1
    )


def test_observations_match_alfworld(data):
    environment = ALFWorld(data)
    scenario = game_of(environment, 0)
    first = environment.reset(scenario)[1]["content"]
    assert "Your task is to: put a mug in cabinet." in first
    assert "Welcome" not in first
    assert "sinkbasin 1" in first
    assert "Possible: go to cabinet 1, go to countertop 1, go to countertop 2, go to microwave 1" in first
    steps = [environment.step(message) for message in environment.solve(scenario)]
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert steps[-1].info == {"invalid_actions": 0, "success": True, "progress": 1.0, "steps": 5}
    assert "Possible" not in steps[-1].observation[0]["content"]
    environment.close()


def test_heating_is_required(data):
    environment = ALFWorld(data)
    scenario = game_of(environment, 2)
    arguments = [message["tool_calls"][0]["function"]["arguments"] for message in environment.solve(scenario)]
    commands = [json.loads(text)["action"] for text in arguments]
    assert "heat mug 1 with microwave 1" in commands
    cold = [command for command in commands if not command.startswith("heat")]
    assert checks.play(environment, scenario, acts(cold))[-1].info["success"] is False
    environment.close()


def test_random_actions_do_not_win(data):
    environment = ALFWorld(data, commands=False)

    def policy(rng, messages):
        return acts([rng.choice(["look", "go to cabinet 1", "take mug 1 from countertop 1", "open cabinet 1"])])[0]

    assert checks.success_of(environment, environment.scenarios("heldout"), policy, turns=4) == 0
    environment.close()


def test_solution_is_the_walkthrough_or_the_plan(data, tmp_path):
    longer = ["look", "go to countertop 2", "take mug 1 from countertop 2", "go to cabinet 1", "open cabinet 1"]
    for walkthrough, length in (([*longer, "move mug 1 to cabinet 1"], 6), (["put mug 1 in/on cabinet 1"], 5)):
        folder = tmp_path / str(length)
        environment = ALFWorld(changed(data, folder, 0, walkthrough=walkthrough))
        scenario = game_of(environment, 0)
        assert len(environment.solve(scenario)) == length
        assert checks.solved(environment, scenario)
        environment.close()


def test_planning_times_out(data):
    environment = ALFWorld(data, plan_timeout=0.01)
    with pytest.raises(EnvironmentFailed, match=r"timed out for .* after 0\.01 s \(environment.plan_timeout\)"):
        environment.solve(environment.scenarios("train")[0])
    environment.close()


def test_solving_does_not_change_the_current_episode(data):
    environment = ALFWorld(data)
    scenario = environment.scenarios("train")[0]
    environment.reset(scenario)
    before = environment.step(acts(["look"])[0]).observation
    environment.solve(scenario)
    after = environment.step(acts(["look"])[0]).observation
    assert [message["content"] for message in after] == [message["content"] for message in before]
    environment.close()


def test_concurrent_resets(data):
    """Instances run in threads, as in the collector; process-wide changes of the engine are reverted."""
    arguments, out = list(sys.argv), sys.stdout
    environments = [ALFWorld(data) for _ in range(4)]
    scenarios = environments[0].scenarios("train")
    with ThreadPoolExecutor(4) as pool:
        observations = list(
            pool.map(lambda environment: [environment.reset(scenario) for scenario in scenarios], environments)
        )
        for environment in environments:
            environment.close()
    assert all(observation == observations[0] for observation in observations)
    assert (sys.argv, sys.stdout) == (arguments, out)


def test_engines_are_reused(data):
    """Each engine has a copy of the planner's library, which cannot be unloaded."""

    def copies():
        maps = Path(f"/proc/{os.getpid()}/maps").read_text().splitlines()
        return len({line.split()[4] for line in maps if "libdownward" in line})

    environment = ALFWorld(data)
    scenario = environment.scenarios("train")[0]
    environment.solve(scenario)
    before = copies()
    for _ in range(3):
        environment.reset(scenario)
        environment.close()
        environment.solve(scenario)
    assert copies() == before
    assert environment.step(acts(["look"])[0]).observation[0]["content"] == "error: the episode is over"


def test_impossible_commands_are_answered_by_the_game(data):
    environment = ALFWorld(data)
    steps = checks.play(environment, environment.scenarios("train")[0], acts(["take moon", "Look.", "LOOK"]))
    assert steps[0].observation[0]["content"].startswith("Nothing happens.")
    assert [step.info["invalid_actions"] for step in steps] == [1, 1, 1]
    environment.close()


def test_episode_ends_after_max_steps(data):
    environment = ALFWorld(data, max_steps=2)
    steps = checks.play(environment, environment.scenarios("train")[0], acts(["look"] * 5))
    assert len(steps) == 2
    assert steps[-1].done
    assert environment.step(acts(["look"])[0]).observation[0]["content"] == "error: the episode is over"
    environment.close()


def test_invalid_json_file_is_named(data, tmp_path):
    other = changed(data, tmp_path, 0)
    trial(other, 0).write_text("<html>")
    with pytest.raises(ResourceError, match=r"trial_0/game.tw-pddl is not a JSON object; download"):
        ALFWorld(other)


def test_planner_failure_fails_the_episode(data, tmp_path):
    problem = json.loads(trial(data, 0).read_text())["pddl_problem"]
    environment = ALFWorld(changed(data, tmp_path, 0, pddl_problem=problem.replace("(inReceptacle ?o", "(within ?o")))
    with pytest.raises(EnvironmentFailed, match="the planner failed"):
        environment.reset(game_of(environment, 0))
    environment.close()


def test_stage_key_depends_on_games_not_on_the_folder(data, tmp_path):
    options = {"data": data, "tasks": None, "unseen": True, "seed": 0, "train": None, "heldout": None}
    key = ALFWorld.key_arguments(options)
    assert "data" not in key
    other = changed(data, tmp_path, 1, walkthrough=["look"])
    assert ALFWorld.key_arguments(options | {"data": other})["games"] != key["games"]
    assert ALFWorld.key_arguments(options) == key


def test_objects_are_numbered_as_in_alfworld():
    """Numbers are in reverse order of the identifiers; a basin differs from its sink."""
    named = names(["mug_bar_b", "mug_bar_a", "sink_bar_1", "sink_bar_1_bar_sinkbasin", "agent1"])
    assert named == {
        "agent1": "agent1",
        "mug_bar_a": "mug 2",
        "mug_bar_b": "mug 1",
        "sink_bar_1": "sink 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 1",
    }


def test_missing_data_error_names_the_download(monkeypatch, tmp_path):
    pytest.importorskip("fast_downward")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(ResourceError, match=rf"no game in {tmp_path}/json_2.1.1/train; .*alfworld-download"):
        ALFWorld()
