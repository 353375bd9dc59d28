"""Environments of verifiers, run by the package in a subprocess: single turn, multi-turn, tools.

The package cannot be installed beside Espalier (it wants another uvicorn): VERIFIERS_PYTHON names the interpreter of an
environment that has it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import psutil
import pytest

from components.environments.adapters.verifiers import LaunchOptions, Verifiers, get_worker
from components.environments.tools import call
from components.errors import EnvironmentFailed, ResourceError, SpecError

pytestmark = pytest.mark.timeout(1800)
FOLDER = str(Path(__file__).with_name("verifiers_tasks"))


def small(taskset, **arguments) -> Verifiers:
    python = os.environ.get("VERIFIERS_PYTHON")
    if python is None and importlib.util.find_spec("verifiers") is None:
        pytest.skip("verifiers is not installed; VERIFIERS_PYTHON may name an interpreter that has it")
    return Verifiers(taskset, folders=[FOLDER], python=python, **arguments)


def say(text):
    return {"role": "assistant", "content": text}


def play(environment, actions, split="train", number=0):
    """Return the tools, the first messages and the steps of an episode."""

    async def episode():
        try:
            tools = await environment.tools()
            scenario = environment.scenarios(split)[number]
            first = await environment.reset(scenario)
            return tools, first, [await environment.step(message) for message in actions]
        finally:
            await environment.close()

    return asyncio.run(episode())


def test_single_turn_tasks_use_their_own_rewards():
    environment = small("vf_sums")
    tools, first, steps = play(environment, [say("it is 1")])
    assert tools == []
    assert first == [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "What is 0 + 1? Answer with the number."},
    ]
    assert steps[0].done
    assert steps[0].reward == 1.0
    assert steps[0].info == {
        "success": True,
        "progress": 1.0,
        "rewards": {"right": 1.0},
        "metrics": {"words": 3.0},
    }
    _, _, steps = play(environment, [say("it is 2")])
    assert steps[0].info["success"] is False


def test_scenarios_are_the_tasks_and_every_fifth_is_held_out():
    environment = small({"id": "vf_sums", "count": 11})
    train, heldout = environment.scenarios("train"), environment.scenarios("heldout")
    assert (len(train), len(heldout)) == (9, 2)
    assert [scenario.difficulty for scenario in train[:4]] == [1, 2, 3, 1]
    assert len({scenario.id for scenario in [*train, *heldout]}) == 11
    other = small("vf_sums", heldout_taskset={"count": 3}, tasks=7, train=6)
    assert (len(other.scenarios("train")), len(other.scenarios("heldout"))) == (6, 3)
    _, _, steps = play(other, [say("1")], split="heldout")
    assert steps[0].info["success"] is True


def test_multi_turn_environments():
    environment = small("vf_guess")
    _, first, steps = play(environment, [say("1"), say("9"), say("3")], number=2)
    assert first == [{"role": "user", "content": "Guess a number from 1 to 10."}]
    assert [step.observation for step in steps[:2]] == [
        [{"role": "user", "content": "higher"}],
        [{"role": "user", "content": "lower"}],
    ]
    assert steps[2].done
    assert steps[2].info["rewards"] == {"guessed": 0.8}
    assert steps[2].info["success"] is False
    assert steps[2].info["progress"] == pytest.approx(0.8)


def test_tools_of_the_package_are_offered():
    environment = small("vf_tools")
    name = "numbers_number"
    tools, _, steps = play(
        environment, [call(name, {"name": "one"}), call("nothing", {}, 1), call(name, {"name": "two"}, 2), say("3")]
    )
    assert [tool["function"]["name"] for tool in tools] == [name]
    assert steps[0].observation[0]["content"] == "1"
    assert steps[0].observation[0]["role"] == "tool"
    assert "no tool nothing" in steps[1].observation[0]["content"]
    assert steps[3].info["success"] is True


def test_concurrent_episodes_share_one_subprocess():
    async def all_at_once():
        environments = [small("vf_guess") for _ in range(8)]
        scenarios = environments[0].scenarios("train")

        async def episode(index):
            environment = environments[index]
            try:
                await environment.reset(scenarios[index])
                await environment.step(say("5"))
                number = scenarios[index].input["task"] + 1
                return number, await environment.step(say(str(number)))
            finally:
                await environment.close()

        results = await asyncio.gather(*map(episode, range(8)))
        workers = {id(environment._worker) for environment in environments}
        return results, workers

    results, workers = asyncio.run(all_at_once())
    assert len(workers) == 1
    assert all(step.done for number, step in results if number != 5)
    assert {round(step.info["rewards"]["guessed"], 1) for number, step in results if number != 5} == {0.9}


def test_environment_error_fails_the_episode():
    with pytest.raises(EnvironmentFailed, match="the environment broke"):
        play(small("vf_guess"), [say("crash")])


def test_episode_can_be_abandoned():
    async def twice():
        environment = small("vf_guess")
        scenarios = environment.scenarios("train")
        try:
            await environment.reset(scenarios[0])
            await environment.step(say("7"))
            await environment.reset(scenarios[1])
            return await environment.step(say(str(scenarios[1].input["task"] + 1)))
        finally:
            await environment.close()

    assert asyncio.run(twice()).done


def test_configuration_errors_are_named():
    with pytest.raises(SpecError, match=r"environment.taskset: .*vf_nothing"):
        small("vf_nothing").scenarios("train")
    with pytest.raises(SpecError, match=r"runs model-written code on this machine; set agent.runtime"):
        small("vf_sums", env={"agent": {"harness": {"id": "bash"}}}).scenarios("train")
    with pytest.raises(SpecError, match="has no id"):
        Verifiers({})
    with pytest.raises(ResourceError, match=r"environment.python: /no/such/python: No such file"):
        Verifiers("x", python="/no/such/python").scenarios("train")


def test_missing_package_error_names_the_installation(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ResourceError, match=r"has no package verifiers.*pip install 'verifiers>=0.4,<0.5'"):
        Verifiers("x", python=str(bare)).scenarios("train")


@pytest.mark.parametrize(("timeout", "error"), [(1e-3, EnvironmentFailed), (300.0, SpecError)])
def test_failed_start_leaves_no_subprocess_and_no_task(tmp_path, timeout, error):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    launch = LaunchOptions(str(bare), (), (), timeout)

    async def start():
        children = set(psutil.Process().children())
        with pytest.raises(error):
            await get_worker('{"config": {"taskset": {"id": "x"}}, "most": 1}', launch)
        await asyncio.sleep(0)
        assert set(psutil.Process().children()) <= children
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(start())


def test_stage_key_contents(tmp_path):
    (tmp_path / "mine.py").write_text("a = 1")
    arguments = {"taskset": "mine", "folders": [str(tmp_path)], "python": "/a", "timeout": 1.0}
    key = Verifiers.key_arguments(arguments)
    assert key == Verifiers.key_arguments({**arguments, "python": "/b", "timeout": 2.0})
    (tmp_path / "mine.py").write_text("a = 2")
    assert key != Verifiers.key_arguments(arguments)
