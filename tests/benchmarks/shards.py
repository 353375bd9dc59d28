"""What shards bring: throughput of a collection by workers, equal digests, and 64 machines with failures, simulated.

    python -m tests.benchmarks.shards [--json] [--at 4096] [--workers 1 2 4] [--places process ray] [--times FILE]

Measured: an endpoint in a process of its own (`stub`) answers every request after half a second. Episodes of four turns
are collected, all at once over all workers: one process, then `compute.shards` of them. With `ray` or `dask` among the
places (where prefect-ray or prefect-dask is installed) also by 2 workers of a local cluster. `wall_s` includes the
start of the processes; `play_s` is the longest time in which a shard played its episodes.

Simulated, on the seconds that each of these episodes took (or those of `--times`, the `times.json` of any artifact):
shards on 1 to 64 machines, of which each fails once in `MTBF` seconds on average, and one in 32 is `SLOW` times slower
than the others. The simulation has the rules of `flows.execution.sharding` in virtual time: a worker takes the next
shard, a shard that dies is computed again from its start, and idle workers compute copies of stragglers. It is the same
for the same recorded times.

    equal_digests      all collections have the same content digest
    speedup            of the measured collections, by workers: wall-clock time of one over that of so many
    play_speedup       the same without the start of the processes
    simulated          speedup by machines, without failures, with failures, and with copies of stragglers
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from components.environments.protocol import Step
from components.json_text import read_json
from components.specs import validate
from components.trajectories.schema import Scenario
from tests.benchmarks.apart import say, stub
from tests.benchmarks.rollouts import ANSWER, LATENCY, OBSERVATION, OPENING, PROMPT, SEEN, TURNS

CLUSTER_WORKERS = 2
MACHINES = (1, 2, 4, 8, 16, 32, 64)
SHARDS = 256
"""Shards of the simulated collection."""
EPISODES_PER_SHARD, AT_ONCE = 512, 64
START = 30.0
"""Seconds until a worker plays: process, engine."""
MTBF = 3600.0
"""Mean time between failures of a machine, in seconds."""
RESTART = 120.0
"""Seconds until a failed machine is replaced."""
SLOW = 4.0
DUPLICATE_AFTER = 1.5


class Parcels:
    """Episodes of `TURNS` turns, as in `rollouts`. count: number of scenarios."""

    def __init__(self, count: int = 64):
        self.count = count

    def scenarios(self, split: str) -> list[Scenario]:
        return [Scenario(f"{split}-{number}", {}, split) for number in range(self.count)]

    def tools(self) -> list[dict[str, Any]]:
        return []

    def reset(self, scenario: Scenario) -> list[dict[str, Any]]:
        self.turn = 0
        return [dict(message) for message in OPENING]

    def step(self, action: dict[str, Any]) -> Step:
        self.turn += 1
        done = self.turn == TURNS
        return Step([] if done else [{"role": "user", "content": SEEN}], 1.0, done, {"success": done})

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures and simulates collections in shards.")
    parser.add_argument("--json", action="store_true", help="print the result on one line")
    parser.add_argument(
        "--at", type=int, default=4096, metavar="N", help="episodes, all at once (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="processes")
    parser.add_argument("--places", nargs="+", default=["process"], choices=["process", "ray", "dask"])
    parser.add_argument("--times", type=Path, help="times.json of an artifact, for the simulation")
    options = parser.parse_args()
    result, seconds = measured(options.at, options.workers, options.places)
    if options.times is not None:
        seconds = list(read_json(options.times).values())
    result["simulated"] = simulated(seconds)
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))


# --- measured ---------------------------------------------------------------------------------------------------------


def measured(at: int, workers: Sequence[int], places: Sequence[str]) -> tuple[dict[str, Any], list[float]]:
    """Return the figures, and the seconds of each episode of the first collection."""
    sizes = {"latency": LATENCY, "turns": TURNS, "prompt": PROMPT, "answer": ANSWER, "observation": OBSERVATION}
    runs: dict[str, dict[str, float]] = {}
    digests, seconds = set(), []
    with (
        tempfile.TemporaryDirectory() as folder,
        stub(*(part for n, v in sizes.items() for part in (f"--{n}", v))) as url,
    ):
        counts = [("process", count) for count in workers]
        counts += [(place, CLUSTER_WORKERS) for place in places if place != "process" and installed(place)]
        for place, count in counts:
            artifact, wall = collected(Path(folder) / f"{place}-{count}", url, at, place, count)
            times = read_json(artifact.path / "times.json")
            seconds = seconds or list(times.values())
            digests.add(artifact.digest)
            name = str(count) if place == "process" else f"{place}-{count}"
            play = artifact.metrics["seconds"]
            runs[name] = {
                "wall_s": round(wall, 2),
                "play_s": round(play, 2),
                "episodes_per_s": round(at / play, 1),
            }
            say(f"{place}, {count} workers: {runs[name]}, digest {artifact.digest[:12]}")
    first = runs[str(workers[0])]
    return {
        "episodes_at_once": at,
        "equal_digests": len(digests) == 1,
        "workers": runs,
        "speedup": {name: round(first["wall_s"] / run["wall_s"], 2) for name, run in runs.items()},
        "play_speedup": {name: round(first["play_s"] / run["play_s"], 2) for name, run in runs.items()},
    }, seconds


def installed(place: str) -> bool:
    found = all(
        importlib.util.find_spec(name) for name in (f"prefect_{place}", {"dask": "distributed"}.get(place, place))
    )
    if not found:
        say(f"{place} is left out: prefect-{place} is not installed")
    return found


def collected(root: Path, url: str, at: int, place: str, workers: int) -> tuple[Any, float]:
    """Return the artifact of a collection, and its wall-clock seconds."""
    from flows.execution.executor import Execution
    from flows.experiment.requests import Requests
    from flows.experiment.spec import ExperimentSpec
    from flows.stages.base import Context
    from flows.terminal.console import Console

    data = {
        "name": "shards",
        "root": str(root),
        "allow": ["tests"],
        "model": {"name": "tiny", "source": "random"},
        "environment": {"_target_": "tests.benchmarks.shards.Parcels", "count": at},
        "reward": {"_target_": "components.rewards.rules.outcome.Outcome"},
        "filter": {"_target_": "components.filters.successful.Successful"},
        "algorithm": {"name": "sft"},
        "agent": {"max_turns": TURNS, "max_tokens": 64},
        "collect": {"scenarios": at, "group_size": 1, "concurrency": max(1, at // workers)},
        "compute": {
            "default": "process",
            "stages": {"collect": place},
            "places": {name: {"name": name} for name in ("local", "process", "ray", "dask")},
            "shards": 1,
            "stage_shards": {"collect": workers},
        },
    }
    spec = validate(ExperimentSpec, data)  # an experiment needs an engine that loads policies, a collection does not
    request = Requests(spec).collect(None, 1)
    request.spec["inference"] = {"name": "remote", "url": url, "model": "policy"}
    with ExitStack() as stack:
        submit, call = None, direct
        if place != "process":
            submit, call = stack.enter_context(PrefectFlow(root))
        execution = Execution(
            spec, Context.at(root), Console(io.StringIO()), None, root / "logs" / "log", submit=submit
        )
        stack.callback(execution.close)
        start = time.perf_counter()
        done = call(lambda: execution.make("collect[1]", 1, request))
        return done.artifact, time.perf_counter() - start


def direct(work: Callable[[], Any]) -> Any:
    return work()


class PrefectFlow:
    """Context of a Prefect server: gives the `submit` of task runners, and a function that calls in a flow."""

    def __init__(self, root: Path):
        self.root = root

    def __enter__(self) -> tuple[Any, Any]:
        from flows.orchestration import server

        self.root.mkdir(parents=True, exist_ok=True)
        os.environ.update(server.client_environment(self.root))
        self.server = server.start(self.root)
        from prefect import flow
        from prefect.settings import temporary_settings

        from flows.orchestration.task_runners import TaskRunners

        self.runners = TaskRunners()

        def call(work: Callable[[], Any]) -> Any:
            made: list[Any] = []
            with temporary_settings(self.server.settings()):
                flow(name="shards")(lambda: made.append(work()))()
            return made[0]

        return self.runners.submit, call

    def __exit__(self, *error: object) -> None:
        self.runners.close()
        self.server.stop()


# --- simulated --------------------------------------------------------------------------------------------------------


def simulated(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the speedups of a collection by machines, on recorded seconds of episodes."""
    chance = random.Random("shards")
    shards = [
        START + makespan([chance.choice(seconds) for _ in range(EPISODES_PER_SHARD)], AT_ONCE) for _ in range(SHARDS)
    ]
    alone = sum(shards)
    forms: dict[str, tuple[float, float, float]] = {
        "without_failures": (0.0, 1.0, 0.0),
        "with_failures": (MTBF, SLOW, 0.0),
        "with_failures_and_copies": (MTBF, SLOW, DUPLICATE_AFTER),
    }
    result: dict[str, Any] = {"shards": SHARDS, "seconds_per_shard": round(median(shards), 1), "speedup": {}}
    for name, (mtbf, slow, factor) in forms.items():
        ends = {count: schedule(shards, count, mtbf=mtbf, slow=slow, factor=factor) for count in MACHINES}
        result["speedup"][name] = {str(count): round(alone / end, 2) for count, (end, _) in ends.items()}
        result[f"{name}_at_{MACHINES[-1]}"] = ends[MACHINES[-1]][1]
    return result


def makespan(tasks: Sequence[float], at_once: int) -> float:
    """Return the time of tasks of which so many run at once, each as soon as a place is free."""
    free = [0.0] * at_once
    for task in tasks:
        heapq.heapreplace(free, free[0] + task)
    return max(free)


def schedule(
    shards: Sequence[float], machines: int, *, mtbf: float, slow: float, factor: float
) -> tuple[float, dict[str, int]]:
    """Return the time of all shards on so many machines, and the numbers of deaths and copies. mtbf: mean time between
    failures of a machine; 0: none. slow: factor of the time on one in 32 machines. factor: of `duplicate_after`."""
    chance = random.Random(f"{machines}/{mtbf}")
    pending = list(range(len(shards)))
    counts = {"deaths": 0, "copies": 0}
    running: dict[int, tuple[int, float]] = {}
    """Shard and start by machine."""
    times: list[float] = []
    finished: set[int] = set()
    copied: set[int] = set()
    events: list[tuple[float, int, str, int]] = []

    def start(machine: int, shard: int, now: float) -> None:
        duration = shards[shard] * (slow if machine % 32 == 31 else 1.0)
        death = chance.expovariate(1 / mtbf) if mtbf else float("inf")
        running[machine] = shard, now
        heapq.heappush(events, (now + min(duration, death), machine, "end" if duration <= death else "death", shard))

    def free(machine: int, now: float) -> None:
        if pending:
            start(machine, pending.pop(0), now)
            return
        alone = {m: work for m, work in running.items() if work[0] not in copied}
        if not factor or not alone or not times:
            return
        due = {m: began + factor * median(times) for m, (_, began) in alone.items()}
        first = min(due, key=lambda m: due[m])
        if due[first] > now:
            heapq.heappush(events, (due[first], machine, "look", -1))
            return
        shard = running[first][0]
        copied.add(shard)
        counts["copies"] += 1
        start(machine, shard, now)

    for machine in range(machines):
        free(machine, 0.0)
    while len(finished) < len(shards):
        now, machine, kind, shard = heapq.heappop(events)
        if kind == "look":
            if machine not in running:
                free(machine, now)
            continue
        if running.get(machine, (-1, 0.0))[0] != shard:
            continue  # it was stopped, because another copy was faster
        _, began = running.pop(machine)
        if kind == "death":
            counts["deaths"] += 1
            start(machine, shard, now + RESTART)
            continue
        times.append(now - began)
        finished.add(shard)
        for other in [m for m, work in running.items() if work[0] == shard]:
            del running[other]
            free(other, now)
        free(machine, now)
        if len(finished) == len(shards):
            return now, counts
    raise AssertionError("unreachable")


if __name__ == "__main__":
    sys.exit(main())
