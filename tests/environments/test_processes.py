"""Environments in subprocesses: identical episodes, no blocking, and a crash fails only one episode."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from components.environments.processes import SubprocessEnvironment
from components.environments.protocol import Restorable, Solver
from components.errors import EnvironmentFailed, SpecError
from components.rollout import collector
from components.rollout.collector import demonstrate
from components.rollout.formats import Presentation
from components.rollout.pool import EnvironmentPool
from components.specs import Target, validate
from tests.environments.heavy import Heavy
from tests.rollout.worlds import Parrot, collect

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1800)


def target(**arguments) -> Target:
    return validate(Target, {"_target_": "tests.environments.heavy.Heavy", **arguments}, allow=["tests"])


def inside(processes: int | None = 2, **arguments):
    return lambda: SubprocessEnvironment(target(**arguments), processes)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert [child for child in psutil.Process().children() if "processes" in " ".join(child.cmdline())] == []


def played(make, jobs=None, **options):
    pool = EnvironmentPool(make)
    try:
        return collect(Parrot(), pool, jobs or Heavy().scenarios("train"), group_size=1, **options)
    finally:
        pool.close()


def test_episodes_equal_those_of_the_wrapped_environment():
    assert repr(played(inside())) == repr(played(Heavy))
    shown = demonstrate(inside(), Heavy().scenarios("train"), Presentation())
    assert repr(shown) == repr(demonstrate(Heavy, Heavy().scenarios("train"), Presentation()))


def test_scenarios_and_optional_methods_equal_those_of_the_wrapped_environment():
    environment = inside()()
    assert isinstance(environment, Solver)
    assert isinstance(environment, Restorable)

    async def through():
        first, second = inside()(), inside()()
        try:
            assert await environment.scenarios("train") == Heavy().scenarios("train")
            scenario = Heavy().scenarios("train")[1]
            await first.reset(scenario)
            await first.step({"content": "x"})
            await second.restore(scenario, await first.save())
            step = await second.step({"content": "y"})
            assert (step.done, step.info["said"]) == (True, ["x", "y"])
        finally:
            for instance in (environment, first, second):
                await instance.close()

    asyncio.run(through())
    plain = validate(Target, {"_target_": "components.environments.games.guess.Guess"})
    assert not isinstance(SubprocessEnvironment(plain), Restorable) or hasattr(plain.factory(), "save")


def test_computation_does_not_block_the_event_loop():
    """The event loop of the collector stays responsive; each of two instances has its own subprocess."""
    late: list[float] = []

    class Punctual(Parrot):
        async def chat(self, request):
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            late.append(time.monotonic() - begun)
            return await super().chat(request)

    pool = EnvironmentPool(inside(seconds=0.4))
    trajectories = collect(Punctual(), pool, Heavy().scenarios("train"), group_size=1, concurrency=4)
    pool.close()
    assert [trajectory.failure for trajectory in trajectories] == [None] * 4
    assert len({trajectory.outcome["process"] for trajectory in trajectories}) == 2
    assert os.getpid() not in {trajectory.outcome["process"] for trajectory in trajectories}
    assert sorted(late)[len(late) // 2] < 0.3


def test_dead_subprocess_fails_one_episode_and_is_replaced(caplog, subtests):
    caplog.set_level(logging.INFO, "components.exceptions")
    for trouble, message in [
        ("die", r"step: its subprocess died \(signal 11\)"),
        ("leave", r"step: its subprocess died \(exit code 3\)"),
        ("bug", r"KeyError: 'no such page' \(tests/environments/heavy\.py:\d+, in bug\)"),
        ("odd", "the result is not JSON-serializable"),
        ("hang", r"step 1 took longer than 3 s \(step_timeout of this stage\)"),
    ]:
        with subtests.test(trouble):
            caplog.clear()
            limit = 3.0 if trouble == "hang" else None  # seconds; others answer at once, also on a busy machine
            trajectories = played(inside(1, trouble=trouble), concurrency=1, step_timeout=limit)
            assert [trajectory.failure is None for trajectory in trajectories] == [True, True, False, True]
            assert trajectories[2].failure.boundary == "environment"
            assert re.search(message, trajectories[2].failure.message)
            assert ('raise KeyError("no such page")' in caplog.text) == (trouble == "bug")  # the subprocess's traceback


def test_transient_failures_are_retried(monkeypatch, subtests):
    monkeypatch.setattr(collector, "FIRST_PAUSE", 0.01)
    for trouble in ["away", "gone", "refused"]:
        with subtests.test(trouble=trouble):
            notices = []
            trajectories = played(inside(trouble=trouble), retries=2, on_retry=notices.append)
            assert trajectories[2].failure.kind == "EnvironmentUnavailable"
            assert len(notices) == 2


def test_invalid_arguments_raise_spec_error():
    with pytest.raises(SpecError, match=r"environment.size: 0: expected 1 or more"):
        played(inside(size=0))
    with pytest.raises(SpecError, match="nowhere"):
        validate(
            Target,
            {
                "_target_": "components.environments.processes.SubprocessEnvironment",
                "environment": {"_target_": "nowhere.At"},
            },
        )


def test_abandoned_call_is_not_mistaken_for_the_next():
    async def impatient():
        environment = inside(seconds=2.0)()
        scenario = Heavy().scenarios("train")[0]
        await environment.reset(scenario)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await environment.step({"content": "x"})
        with pytest.raises(EnvironmentFailed, match="the environment is busy"):
            await environment.step({"content": "y"})
        await environment.close()

    asyncio.run(impatient())


def test_subprocesses_end_with_their_parent():
    code = """
import asyncio, sys
from tests.environments.test_processes import Heavy, inside
async def main():
    environment = inside(trouble="hang")()
    await environment.reset(Heavy().scenarios("train")[2])
    print(environment._process.pid, flush=True)
    await environment.step({"content": "x"})
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        process.wait()
        child.wait(600)


def test_number_of_processes_is_not_in_the_stage_key():
    def key(**arguments):
        data = {
            "_target_": "components.environments.processes.SubprocessEnvironment",
            "environment": target().model_dump(),
        }
        return validate(Target, data | arguments, allow=["tests"]).resolved()

    assert key() == key(processes=3)
    assert key()["environment"]["source_sha256"]
