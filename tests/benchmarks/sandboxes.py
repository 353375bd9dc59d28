"""Time and memory of many sandboxes at once, and what a killed process leaves of them.

    python -m tests.benchmarks.sandboxes [--json] [--at 1 6 64] [--runs 64]

For each number at once, two measurements. Programs of `environment=repair` are repaired, which tests each in a sandbox:

    seconds           wall-clock time of all test runs

A process of its own starts as many sandboxes, each of which holds a Python program that waits. When all of them do, it
is ended by SIGKILL:

    mb                memory of a sandbox: proportional set size (PSS) of its processes
    host_mb           memory that a sandbox takes in the process that started it
    processes         processes of a sandbox
    gone_seconds      time from SIGKILL until none of these processes is left
    left              processes, and control groups after the next process has used the sandbox, that are left
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from components.environments.worlds.repair import Repair
from components.sandbox import Limits, Sandbox, cgroups
from tests.benchmarks.apart import say
from tests.source import ROOT

WAITING = """
import json, os
link = int(os.environ["CALLS"])
os.write(link, b"here\\n")
os.read(link, 1)
"""
PATIENCE = 60.0
"""Seconds that the processes of a killed process have to end."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sandboxes", description="Measures sandboxes.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 6, 64], help="sandboxes at once")
    parser.add_argument("--runs", type=int, default=64, help="test runs that are timed")
    parser.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        hold(options.hold)
        return
    measured = {}
    for count in options.at:
        measured[str(count)] = timed(count, options.runs) | killed(count)
        say(f"{count} at once: {measured[str(count)]}")
    if options.json:
        print(json.dumps(measured))


def timed(count: int, runs: int) -> dict[str, float]:
    """Repair programs, of which `count` are tested at once."""
    environments = [Repair(train=runs, heldout=1) for _ in range(runs)]

    async def repair(environment: Repair, number: int) -> None:
        scenario = environment.scenarios("train")[number]
        environment.reset(scenario)
        calls = [call for message in environment.solve(scenario) for call in message["tool_calls"]]
        edits = [call for call in calls if call["function"]["name"] == "edit"]
        step = await environment.step({"content": "", "tool_calls": edits})
        assert step.info["success"], scenario

    async def repair_all() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(count))
        await asyncio.gather(*(repair(environment, number) for number, environment in enumerate(environments)))

    asyncio.run(repair(environments[0], 0))  # checks the sandbox once
    begin = time.monotonic()
    asyncio.run(repair_all())
    return {"seconds": time.monotonic() - begin}


def hold(count: int) -> None:
    """Start sandboxes and keep them; print the memory of this process before and with them."""
    sandbox, arrived, never = Sandbox(Limits(seconds=600, memory_mb=128)), threading.Semaphore(0), threading.Event()

    def arrive(line: bytes) -> bytes:
        arrived.release()
        never.wait()
        return b""

    sandbox.python("")
    before = psutil.Process().memory_info().rss
    for _ in range(count):
        threading.Thread(target=lambda: sandbox.python(WAITING, answer=arrive), daemon=True).start()
    for _ in range(count):
        arrived.acquire()
    print(before, psutil.Process().memory_info().rss, flush=True)
    never.wait()


def killed(count: int) -> dict[str, Any]:
    """Kill a process that holds sandboxes."""
    command = [sys.executable, "-m", "tests.benchmarks.sandboxes", "--hold", str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        before, after = map(int, process.stdout.readline().split())
        processes = psutil.Process(process.pid).children(recursive=True)
        memory = sum(one.memory_full_info().pss for one in processes)
        begin = time.monotonic()
        process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
        seconds = time.monotonic() - begin
    left = [f"process {one.pid}" for one in alive]
    cgroups.hierarchy.cache_clear()
    if (place := cgroups.hierarchy()) is not None:
        left += [str(folder) for folder in place.folder.glob(f"*-{process.pid}-*")]
    return {
        "mb": memory / count / 1e6,
        "host_mb": (after - before) / count / 1e6,
        "processes": len(processes) / count,
        "gone_seconds": seconds,
        "left": left,
    }


if __name__ == "__main__":
    main()
