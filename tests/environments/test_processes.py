"""Environments in processes of their own: the same episodes, no one held up, and a death is one episode's failure."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from components.environments.processes import InProcesses
from components.environments.protocol import Restorable, Solver
from components.errors import EnvironmentFailed, SpecError
from components.rollout import collector
from components.rollout.collector import demonstrate
from components.rollout.pool import Pool
from components.specs import Target, validate
from tests.environments.heavy import Heavy
from tests.rollout.worlds import Parrot, collect

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1800)


def target(**arguments) -> Target:
    return validate(Target, {"_target_": "tests.environments.heavy.Heavy", **arguments}, allow=["tests"])


def inside(processes: int | None = 2, **arguments):
    return lambda: InProcesses(target(**arguments), processes)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert [one for one in psutil.Process().children() if "processes" in " ".join(one.cmdline())] == []


def played(make, jobs=None, **options):
    pool = Pool(make)
    try:
        return collect(Parrot(), pool, jobs or Heavy().scenarios("train"), group_size=1, **options)
    finally:
        pool.close()


def test_episodes_are_those_of_the_environment_inside():
    assert repr(played(inside())) == repr(played(Heavy))
    shown = demonstrate(inside(), Heavy().scenarios("train"))
    assert repr(shown) == repr(demonstrate(Heavy, Heavy().scenarios("train")))


def test_its_scenarios_and_what_it_can_do_are_those_of_the_environment_inside():
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
            for one in (environment, first, second):
                await one.close()

    asyncio.run(through())
    plain = validate(Target, {"_target_": "components.environments.games.guess.Guess"})
    assert not isinstance(InProcesses(plain), Restorable) or hasattr(plain.factory(), "save")


def test_what_it_computes_holds_up_nobody():
    """While it computes, the loop of the collector is free; each of two has its own process."""
    late: list[float] = []

    class Punctual(Parrot):
        async def chat(self, request):
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            late.append(time.monotonic() - begun)
            return await super().chat(request)

    pool = Pool(inside(seconds=0.4))
    found = collect(Punctual(), pool, Heavy().scenarios("train"), group_size=1, concurrency=4)
    pool.close()
    assert [one.failure for one in found] == [None] * 4
    assert len({one.outcome["process"] for one in found}) == 2
    assert os.getpid() not in {one.outcome["process"] for one in found}
    assert sorted(late)[len(late) // 2] < 0.3


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("die", "step: its process died (signal 11)"),
        ("leave", "step: its process died (exit code 3)"),
        ("bug", "KeyError: 'no such page'"),
        ("odd", "returned what is no JSON data"),
        ("hang", "step 1 took longer than 10 s (step_timeout of this stage)"),
    ],
)
def test_a_process_that_dies_is_one_episodes_failure_and_is_replaced(trouble, message):
    limit = 10.0 if trouble == "hang" else None  # seconds; others answer at once, also on a busy machine
    found = played(inside(1, trouble=trouble), concurrency=1, step_timeout=limit)
    assert [one.failure is None for one in found] == [True, True, False, True]
    assert found[2].failure.boundary == "environment"
    assert message in found[2].failure.message


@pytest.mark.parametrize("trouble", ["away", "gone", "refused"])
def test_what_passes_is_played_again(monkeypatch, trouble):
    monkeypatch.setattr(collector, "FIRST_PAUSE", 0.01)
    told = []
    found = played(inside(trouble=trouble), retries=2, on_retry=told.append)
    assert found[2].failure.kind == "EnvironmentAway"
    assert len(told) == 2


def test_a_mistake_in_its_arguments_is_the_users():
    with pytest.raises(SpecError, match=r"environment.size: 0: expected 1 or more"):
        played(inside(size=0))
    with pytest.raises(SpecError, match="nowhere"):
        validate(
            Target,
            {"_target_": "components.environments.processes.InProcesses", "environment": {"_target_": "nowhere.At"}},
        )


def test_a_call_that_was_given_up_is_not_mistaken_for_the_next():
    async def impatient():
        environment = inside(seconds=2.0)()
        scenario = Heavy().scenarios("train")[0]
        await environment.reset(scenario)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await environment.step({"content": "x"})
        with pytest.raises(EnvironmentFailed, match="busy still"):
            await environment.step({"content": "y"})
        await environment.close()

    asyncio.run(impatient())


def test_processes_end_with_who_asked_them():
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


def test_how_many_there_are_is_in_no_stage_key():
    def key(**arguments):
        data = {"_target_": "components.environments.processes.InProcesses", "environment": target().model_dump()}
        return validate(Target, data | arguments, allow=["tests"]).resolved()

    assert key() == key(processes=3)
    assert key()["environment"]["source_sha256"]
