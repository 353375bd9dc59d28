"""ScienceWorld: gold paths, the benchmark's splits, reuse and replacement of simulators."""

from __future__ import annotations

import gc
import json
import shutil
import threading

import pytest

from components.environments.adapters import scienceworld
from components.environments.adapters.scienceworld import TASKS, ScienceWorld
from components.environments.tools import acts
from components.errors import EnvironmentFailed, ResourceError, SpecError
from tests.environments import checks

pytestmark = pytest.mark.timeout(1800)
SHORT = ["find-non-living-thing", "lifespan-longest-lived"]


def skip_without_simulator() -> None:
    pytest.importorskip("scienceworld")
    if shutil.which("java") is None:
        pytest.skip("there is no Java")


def small(tasks=SHORT, **arguments) -> ScienceWorld:
    skip_without_simulator()
    return ScienceWorld(tasks, **{"train": 4, "heldout": 2, **arguments})


@pytest.fixture(scope="module", autouse=True)
def no_simulators_are_left():
    yield
    scienceworld._stop_all()


def test_it_satisfies_the_environment_contract():
    checks.check(small, few=1)


def test_gold_paths_succeed_and_lengthen_with_difficulty():
    tasks = ["find-non-living-thing", "power-component", "melt"]
    environment = small(tasks, train=3)
    lengths = []
    for scenario in environment.scenarios("train"):
        lengths.append((scenario.difficulty, len(environment.solve(scenario))))
        assert checks.solved(environment, scenario), scenario.id
    assert lengths == sorted(lengths)
    assert [difficulty for difficulty, _ in lengths] == [1, 2, 4]
    environment.close()


def test_splits_are_those_of_the_benchmark():
    environment = small(None, train=30, heldout=30)
    for split, method in (("train", "getVariationsTrain"), ("heldout", "getVariationsTest")):
        scenarios = environment.scenarios(split)
        assert {scenario.type for scenario in scenarios} == set(TASKS)
        for scenario in scenarios[:6]:
            simulator = environment._simulator()
            simulator.load(scenario.input, gold=False)
            assert simulator.call("getTaskMaxVariations", scenario.type) == TASKS[scenario.type][0]
            assert scenario.input["variation"] in list(simulator.call(method))
    environment.close()


def test_random_actions_do_not_succeed():
    environment = small()

    def policy(rng, messages):
        room = rng.choice(["kitchen", "workshop", "outside", "bathroom"])
        return acts([rng.choice([f"go to {room}", "look around", "focus on table", "pick up apple", "open door"])])[0]

    assert checks.success_of(environment, environment.scenarios("train"), policy, turns=10) == 0


def test_invalid_actions_are_counted():
    environment = small()
    steps = checks.play(environment, environment.scenarios("train")[0], acts(["dance", "x" * 10_000, "\x00", "wait"]))
    assert [step.info["invalid_actions"] for step in steps] == [1, 2, 3, 3]
    assert not steps[-1].done


def test_wrong_focus_ends_the_episode_with_zero():
    environment = small(["lifespan-longest-lived"])
    scenario = environment.scenarios("train")[0]
    gold = [
        json.loads(message["tool_calls"][0]["function"]["arguments"])["action"]
        for message in environment.solve(scenario)
    ]
    right = next(action for action in gold if action.startswith("focus on"))
    animals = ("bee", "butterfly", "dove", "hedgehog", "rabbit", "mouse", "toad", "ant", "moth", "frog", "wolf")
    wrong = [f"focus on {animal}" for animal in animals if animal not in right]
    steps = checks.play(environment, scenario, acts([*gold[: gold.index(right)], *wrong]))
    assert steps[-1].done
    assert steps[-1].info["progress"] == 0.0
    assert not steps[-1].info["success"]


def test_progress_is_the_score_and_the_steps_rewards_sum_to_it():
    environment = small()
    scenario = environment.scenarios("train")[0]
    steps = checks.play(environment, scenario, environment.solve(scenario))
    assert sum(step.reward for step in steps) == pytest.approx(1.0)
    progress = [step.info["progress"] for step in steps]
    assert progress == sorted(progress)
    assert progress[0] < 1.0


def test_simulators_are_reused_and_replaced_after_a_crash():
    environment = small()
    scenario = environment.scenarios("train")[0]
    environment.reset(scenario)
    process = environment.simulator.process.pid
    environment.close()
    two = small()
    first = two.reset(scenario)
    assert two.simulator.process.pid == process
    two.simulator.process.kill()
    with pytest.raises(EnvironmentFailed, match="the simulator failed at step"):
        two.step(acts(["look around"])[0])
    assert two.reset(scenario) == first
    two.close()


def test_a_stopped_simulator_logs_no_error(caplog):
    skip_without_simulator()
    simulator = scienceworld.Simulator()
    simulator.stop()
    del simulator
    gc.collect()  # the finalizers of py4j call the stopped process
    assert [record for record in caplog.records if record.name.startswith("py4j")] == []


def test_instances_run_in_threads():
    environments = [small(), small()]
    scenario = environments[0].scenarios("train")[0]
    infos = [None, None]

    def play(number: int) -> None:
        infos[number] = [step.info for step in checks.play(environments[number], scenario, solution)]

    solution = environments[0].solve(scenario)
    threads = [threading.Thread(target=play, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert infos[0] == infos[1]
    assert infos[0][-1]["success"]
    for environment in environments:
        environment.close()


def test_configuration_errors_are_named(monkeypatch):
    with pytest.raises(SpecError, match=r"no task 'boiling'.*Did you mean 'boil'"):
        small(["boiling"])
    with pytest.raises(SpecError, match=r"environment.train: is 99; the tasks have only 4 variations"):
        small(["identify-life-stages-2"], train=99)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ResourceError, match="install a Java runtime"):
        ScienceWorld()
