"""Rounds per hour by `collect.overlap`, where collecting waits for a slow environment and training computes.

    python -m tests.benchmarks.overlap [--overlaps 0 1] [--rounds 6] [--seconds 20] [--ratio 1] [--json]

The same experiment on a tiny model with each overlap, by the stages of a run without Prefect and MLflow. A collection
plays its episodes at the same time, and each of their turns waits, as for a slow engine or service: `--seconds` for a
collection. The epochs of a training are chosen so that it computes for `--seconds` / `--ratio`. With a ratio of 1 one
round ahead is enough; with a ratio of 4, collections bound the run until four of them are in progress.

Rounds per hour are those between the end of the first round and that of the last but one: each of them has the
collections beside it that a run of many rounds has, if their number, `--rounds` - 2, is a multiple of each overlap.
`overlap_speedup` is the rounds per hour with an overlap of 1 over those with 0.
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

from components.environments.protocol import Step
from components.specs import validate
from components.trajectories.schema import Scenario
from flows.execution.executor import Execution
from flows.execution.overlap import Concurrent
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.stages.base import Context
from flows.terminal.console import Console, hush

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


def _run(folder: Path, name: str, step: float, *, rounds: int, epochs: int, overlap: int) -> Rounds:
    root = folder / name
    root.mkdir()
    (folder / "models").mkdir(exist_ok=True)
    (root / "models").symlink_to(folder / "models")
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
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0, help="that one collection takes")
    parser.add_argument("--ratio", type=float, default=1.0, help="of the time of a collection to that of a training")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, nothing else")
    options = parser.parse_args()
    if options.rounds < 3:
        parser.error("--rounds: at least 3, of which those between the first and the last are measured")
    found = measure(options.rounds, options.seconds, options.overlaps, options.ratio, tell=not options.json)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
