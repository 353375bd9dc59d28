"""Rounds per hour by `collect.overlap`, where collecting waits for a slow environment and training computes.

    python -m tests.benchmarks.overlap [--overlaps 0 1] [--rounds 6] [--seconds 20] [--ratio 1] [--json]

The same experiment on a tiny model with each overlap, by the stages of a run without Prefect and MLflow. A collection
plays its episodes at the same time, and each of their turns waits, as for a slow engine or service: `--seconds` for a
collection. The epochs of a training are chosen so that it computes for `--seconds` / `--ratio`. With a ratio of 1 one
round ahead is enough; with a ratio of 4, collections bound the run until four of them are in progress.

Rounds per hour are those between the end of the first round and that of the last but one: each of them has the
collections beside it that a run of many rounds has, if their number, `--rounds` - 2, is a multiple of each overlap.
`overlap_speedup` is the rounds per hour with an overlap of 1 over those with 0.

    python -m tests.benchmarks.overlap --tail 10 [--rounds 12] [--seconds 1] [--json]

The same with a stub of vLLM, which streams the tokens of an answer at a fixed rate. One answer in 16 is `--tail` times
as long as the others, which take `--seconds`; a training is short. Each overlap waits for the slowest episode of a
round; `collect.partial.groups` leaves the slowest groups to later rounds. `speedup` is over the first row. The age of a
token is the number of versions between the policy that sampled it and the one that is trained on it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.algorithms.train import policy_digest
from components.environments.protocol import Step
from components.inference.protocol import BASE_POLICY
from components.specs import validate
from components.trajectories.schema import Scenario, Trajectory
from components.trajectories.store import read_trajectories
from components.trajectories.versions import NOT_SAMPLED, token_policies
from flows.execution.executor import Execution
from flows.execution.overlap import Concurrent
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.stages.base import Context
from flows.terminal.console import Console, hush
from tests.inference.fake import environment
from tests.inference.fake_vllm.vllm.entrypoints.openai.api_server import TAIL

TURNS = 5
EPISODES = 8


def prompt(scenario: str) -> str:
    return f"Tell me about {scenario}."


class Waiting:
    """A conversation of `last` turns, each of which takes `seconds`, and which ends well."""

    def __init__(self, train: int = 64, seconds: float = 0.2, last: int = TURNS):
        self.train = train
        self.seconds = seconds
        self.last = last

    def scenarios(self, split: str) -> list[Scenario]:
        count = {"train": self.train, "heldout": 1}.get(split, 0)
        return [Scenario(f"{split}-{number}", {}, split) for number in range(count)]

    def tools(self) -> list[dict[str, Any]]:
        return []

    def reset(self, scenario: Scenario) -> list[dict[str, Any]]:
        self.turns = 0
        return [{"role": "user", "content": prompt(scenario.id)}]

    async def step(self, action: dict[str, Any]) -> Step:
        await asyncio.sleep(self.seconds)
        self.turns += 1
        done = self.turns == self.last
        return Step([] if done else [{"role": "user", "content": "Go on."}], float(done), done, {"success": done})

    def close(self) -> None: ...


def overlap(rounds: int = 5, seconds: float = 20.0) -> float:
    """Rounds per hour with `collect.overlap=1` over those without."""
    return float(measure(rounds, seconds)["overlap_speedup"])


def measure(
    rounds: int, seconds: float, overlaps: Sequence[int] = (0, 1), ratio: float = 1.0, tell: bool = False
) -> dict[str, Any]:
    """Return the rounds per hour by overlap. tell: print each as soon as it is measured."""
    hush()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the trainer leaves a core to the engine
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="espalier-overlap-") as folder:
        first = _run(Path(folder), "first", seconds / TURNS, rounds=2, epochs=16, overlap=0)
        epochs = max(1, round(16 * seconds / ratio / first.seconds("train[2]")))  # the first also loads
        for number in overlaps:
            run = _run(Path(folder), f"overlap-{number}", seconds / TURNS, rounds=rounds, epochs=epochs, overlap=number)
            measured.append(
                {
                    "overlap": number,
                    "rounds_per_hour": round(run.per_hour, 1),
                    "speedup": round(run.per_hour / (measured[0]["rounds_per_hour"] if measured else run.per_hour), 3),
                    "collect_seconds": round(run.median("collect"), 2),
                    "train_seconds": round(run.median("train"), 2),
                }
            )
            if tell:
                print("  ".join(f"{name} {value}" for name, value in measured[-1].items()), flush=True)
    found: dict[str, Any] = {"rounds": rounds, "episodes": EPISODES, "epochs": epochs, "measured": measured}
    by_overlap = {item["overlap"]: item["rounds_per_hour"] for item in measured}
    if {0, 1} <= by_overlap.keys():
        found["overlap_speedup"] = round(by_overlap[1] / by_overlap[0], 3)
    return found


PARTIAL: list[tuple[int, dict[str, int] | None]] = [
    (1, None),
    (2, None),
    (1, {"groups": 4, "rounds": 2}),
    (1, {"groups": 4, "rounds": 3}),
]
"""Overlaps and partial rollouts that are compared at a long tail."""


def measure_tail(rounds: int, seconds: float, tail: int, tell: bool = False) -> dict[str, Any]:
    """Return the rounds per hour of each of `PARTIAL`. tail: length of the longest answers over that of the others."""
    hush()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="espalier-tail-") as name:
        folder = Path(name)
        python = environment(folder / "vllm")
        for number, (overlapped, partial) in enumerate(PARTIAL):
            root = _root(folder, f"tail-{number}")
            experiment = _experiment(root, 0.0, rounds, 1, overlapped)
            experiment["environment"] |= {"train": 4 * EPISODES, "last": 1}
            experiment["collect"] |= {"group_size": 4, "partial": partial}
            experiment["agent"] = {"max_turns": 1, "max_tokens": TAIL * tail}
            fault = f"tail:{tail}:{seconds / TAIL}"
            experiment["inference"] = {"name": "vllm", "python": python, "prove": False, "arguments": {"fault": fault}}
            run = Rounds(root, experiment)
            measured.append(
                {
                    "overlap": overlapped,
                    "partial": partial,
                    "rounds_per_hour": round(run.per_hour, 1),
                    "speedup": round(run.per_hour / (measured[0]["rounds_per_hour"] if measured else run.per_hour), 3),
                    "groups_per_hour": round(run.groups_per_hour, 1),
                    **run.ages(),
                }
            )
            if tell:
                print("  ".join(f"{name} {value}" for name, value in measured[-1].items()), flush=True)
    return {"tail": {"rounds": rounds, "seconds": seconds, "tail": tail, "measured": measured}}


def _root(folder: Path, name: str) -> Path:
    root = folder / name
    root.mkdir()
    (folder / "models").mkdir(exist_ok=True)
    (root / "models").symlink_to(folder / "models")
    return root


def _run(folder: Path, name: str, step: float, *, rounds: int, epochs: int, overlap: int) -> Rounds:
    root = _root(folder, name)
    return Rounds(root, _experiment(root, step, rounds, epochs, overlap))


class Rounds:
    """One run, by its stages without Prefect and MLflow. `ended` are the ends of its rounds by the monotonic clock,
    `per_hour` the rounds between the first and the last but one."""

    def __init__(self, root: Path, experiment: dict[str, Any]):
        spec = validate(ExperimentSpec, experiment)
        self.execution = Execution(spec, Context.at(root), Console(io.StringIO()), None, root / "log")
        self.ended: list[float] = []
        try:
            run = Run(
                spec,
                self.execution.artifact,
                Concurrent(self.execution, lambda run: lambda label, step, request: run(label, step, request).artifact),
                on_round=lambda number, artifacts: self.ended.append(time.monotonic()),
            )
            run.execute()
        finally:
            self.execution.close()
            self.execution.context.warm.close()
        ends = self.ended[:-1]
        self.per_hour = 3600 * (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0

    def seconds(self, label: str) -> float:
        return self.execution.done[label].seconds

    @property
    def groups_per_hour(self) -> float:
        """Groups that the rounds behind `per_hour` train on."""
        between = range(2, len(self.ended))
        groups = sum(len({one.group for one in self._collected(number)}) for number in between)
        return self.per_hour * groups / len(between)

    def ages(self) -> dict[str, float]:
        """Return the mean and the largest age of a token of all rounds."""
        versions = {BASE_POLICY: 0}
        for number in range(1, len(self.ended) + 1):
            versions[policy_digest(self.execution.done[f"train[{number}]"].artifact.path)] = number
        ages = [
            number - 1 - versions[policy]
            for number in range(1, len(self.ended) + 1)
            for one in self._collected(number)
            for policy in token_policies(one)[0]
            if policy != NOT_SAMPLED
        ]
        return {"mean_age": round(statistics.mean(ages), 2), "largest_age": max(ages)}

    def _collected(self, number: int) -> list[Trajectory]:
        path = self.execution.done[f"collect[{number}]"].artifact.path
        return list(read_trajectories(path / "trajectories.parquet"))

    def median(self, kind: str) -> float:
        """Return the median seconds of a kind of stage; the first of each kind also loads its model."""
        return statistics.median(done.seconds for label, done in self.execution.done.items() if f"{kind}[" in label)


def _experiment(root: Path, step: float, rounds: int, epochs: int, overlap: int) -> dict[str, Any]:
    return {
        "name": "overlap",
        "root": str(root),
        "rounds": rounds,
        "allow": ["tests"],
        "model": {"name": "tiny", "source": "random"},
        "environment": {"_target_": "tests.benchmarks.overlap.Waiting", "train": EPISODES, "seconds": step},
        "reward": {"_target_": "components.rewards.rules.outcome.Outcome"},
        "filter": {"_target_": "components.filters.everything.Everything"},
        "algorithm": {
            "name": "grpo",
            "baseline": "none",
            "scale": "none",
            "epochs": epochs,
            "learning_rate": 1e-6,
        },
        "collect": {"scenarios": EPISODES, "group_size": 1, "overlap": overlap},
        "agent": {"max_turns": TURNS, "max_tokens": 8},
        "deploy": {"mode": "none"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the rounds per hour by collect.overlap.")
    parser.add_argument("--overlaps", type=int, nargs="+", default=[0, 1], metavar="K")
    parser.add_argument("--rounds", type=int, help="6, with --tail 12")
    parser.add_argument("--seconds", type=float, help="that one collection takes (20), with --tail a short answer (1)")
    parser.add_argument("--tail", type=int, help="length of the longest answers over that of the others")
    parser.add_argument("--ratio", type=float, default=1.0, help="of the time of a collection to that of a training")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, nothing else")
    options = parser.parse_args()
    rounds = options.rounds or (12 if options.tail else 6)
    seconds = options.seconds or (1.0 if options.tail else 20.0)
    if rounds < 3:
        parser.error("--rounds: at least 3, of which those between the first and the last are measured")
    if options.tail:
        found = measure_tail(rounds, seconds, options.tail, tell=not options.json)
    else:
        found = measure(rounds, seconds, options.overlaps, options.ratio, tell=not options.json)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
