"""Tests of processes that agents start: none outlives its episode, and none logs after its end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import psutil
import pytest

from components.aio import ending_processes, run
from components.inference.app import AppOptions
from components.inference.server import ModelServer
from components.rollout.own_agent import MODEL, OwnAgent
from components.rollout.players.player import Player
from tests.rollout.worlds import Echo, Parrot, collect, endpoint, scenarios

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
    import asyncio
    import gc
    import sys
    import time

    from components.errors import TooManyFailures
    from components.rollout.players.player import Player
    from tests.rollout.worlds import endpoint, Echo, Parrot, collect, scenarios

    started = asyncio.Event()
    running = 0


    async def agent(scenario):
        global running
        if scenario.input["number"] == 0:
            await started.wait()
            raise KeyError("no such page")
        command = [sys.executable, "-c", "import time; time.sleep({seconds})", {mark!r}]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        process = await asyncio.create_subprocess_exec(*command, **pipes)
        running += 1
        if running == 3:
            started.set()
        await process.communicate()


    with endpoint(Parrot(), agent) as (own, _, _):
        try:
            collect(Parrot(), Echo, scenarios(4), player=Player(own), group_size=1, max_failures=0, timeout=600.0)
        except TooManyFailures as error:
            print("stopped:", error)
    time.sleep({seconds} + 1)  # the processes have ended by now: asyncio's threads hear of it
    gc.collect()
"""


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes with the mark among their arguments."""
    return [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or ())]


def test_nothing_follows_when_too_many_fail():
    mark = f"mark-{uuid.uuid4().hex}"
    code = textwrap.dedent(SCRIPT).format(seconds=2, mark=mark)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.stdout.startswith("stopped: 1 of 4 episodes failed")
    assert done.stderr == ""
    assert marked(mark) == []


@pytest.mark.parametrize("ends", ["by its time", "by an error", "by itself"])
def test_a_process_ends_with_its_episode(ends):
    mark = f"mark-{uuid.uuid4().hex}"

    async def agent(scenario):
        command = [sys.executable, "-c", "import time; time.sleep(600)", mark]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert [process.pid for process in marked(mark)] == [process.pid]
        if ends == "by an error":
            raise KeyError("no such page")
        if ends == "by its time":
            await process.wait()
        return 1.0

    engines: dict = {}
    with ModelServer(Parrot(), MODEL, AppOptions(engines=engines, timeout=600)) as server:
        player = Player(OwnAgent(agent, server.url, engines))
        timeout = 2.0 if ends == "by its time" else 100.0
        (trajectory,) = collect(Parrot(), Echo, scenarios(1), player=player, group_size=1, timeout=timeout)
    assert (trajectory.failure is None) == (ends == "by itself")
    assert marked(mark) == []


def test_the_processes_of_others_go_on():
    async def both() -> tuple[int | None, int | None, int]:
        async def start() -> asyncio.subprocess.Process:
            return await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")

        async def inside() -> asyncio.subprocess.Process:
            async with ending_processes():
                return await start()

        outer = await start()
        killed = await inside()
        still = outer.returncode
        outer.kill()
        return killed.returncode, still, await outer.wait()

    assert run(both()) == (-9, None, -9)


def test_the_reason_of_a_process_is_its_error_and_not_its_command_line():
    def agent(scenario, api_key):
        code = "import sys; sys.stderr.write('noise\\n'); raise ValueError('no such page ' + sys.argv[1])"
        command = [sys.executable, "-c", code, api_key]
        subprocess.run(command, check=True, capture_output=True)

    with endpoint(Parrot(), agent) as (own, _, _):
        (trajectory,) = collect(Parrot(), Echo, scenarios(1), player=Player(own), group_size=1, timeout=600.0)
    assert trajectory.failure is not None
    assert trajectory.failure.message.startswith(
        f"CalledProcessError: {sys.executable}: exit code 1: ValueError: no such page *** (tests/rollout/"
    )
