"""What `collect.overlap` brings where collecting waits for the environment and training computes for as long.

    python -m tests.benchmarks.overlap [--rounds 5] [--seconds 20] [--json]

The same experiment on a tiny model, one round after the other and overlapped, by the stages of a run without Prefect
and MLflow. A step of the environment takes 0.2 s; there are as many episodes as make one collection take about
`--seconds`, and as many passes over them as make the training take as long, by a round that is played before and not
counted. Rounds per hour are those between the end of the first round and the end of the last but one, in which each
training has a collection beside it: what a run of many rounds tends to. `overlap_speedup` is those with overlap over
those without.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import tempfile
import time
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

STEP_SECONDS = 0.2
TURNS = 5
AT_ONCE = 8


class Waiting:
    """A conversation of `TURNS` turns, of which each takes `STEP_SECONDS`, and which ends well."""

    def __init__(self, train: int = 64):
        self.train = train

    def scenarios(self, split: str) -> list[Scenario]:
        count = {"train": self.train, "heldout": 1}.get(split, 0)
        return [Scenario(f"{split}-{number}", {}, split) for number in range(count)]

    def tools(self) -> list[dict[str, Any]]:
        return []

    def reset(self, scenario: Scenario) -> list[dict[str, Any]]:
        self.turns = 0
        return [{"role": "user", "content": f"Tell me about {scenario.id}."}]

    async def step(self, action: dict[str, Any]) -> Step:
        await asyncio.sleep(STEP_SECONDS)
        self.turns += 1
        done = self.turns == TURNS
        return Step([] if done else [{"role": "user", "content": "Go on."}], float(done), done, {"success": done})

    def close(self) -> None: ...


def overlap(rounds: int = 5, seconds: float = 20.0) -> float:
    """Rounds per hour with `collect.overlap=1` over those without."""
    return float(measure(rounds, seconds)["overlap_speedup"])


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    hush()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the trainer leaves a core to the engine
    episodes = max(AT_ONCE, round(seconds / STEP_SECONDS / TURNS) * AT_ONCE)
    with tempfile.TemporaryDirectory(prefix="espalier-overlap-") as folder:
        first = _Run(Path(folder), "first", episodes, rounds=2, epochs=4, overlapped=0)
        epochs = max(1, round(4 * first.seconds("collect[2]") / first.seconds("train[2]")))  # the first also loads
        one, other = (
            _Run(Path(folder), f"overlap-{overlapped}", episodes, rounds=rounds, epochs=epochs, overlapped=overlapped)
            for overlapped in (0, 1)
        )
    return {
        "rounds": rounds,
        "episodes": episodes,
        "epochs": epochs,
        "collect_seconds": round(one.seconds("collect[2]"), 2),
        "train_seconds": round(one.seconds("train[2]"), 2),
        "collect_seconds_overlapped": round(other.seconds("collect[3]"), 2),
        "train_seconds_overlapped": round(other.seconds("train[2]"), 2),
        "rounds_per_hour": round(one.per_hour, 1),
        "rounds_per_hour_overlapped": round(other.per_hour, 1),
        "overlap_speedup": round(other.per_hour / one.per_hour, 3),
    }


class _Run:
    """One run; `per_hour` are its rounds."""

    def __init__(self, folder: Path, name: str, episodes: int, *, rounds: int, epochs: int, overlapped: int):
        root = folder / name
        root.mkdir()
        (folder / "models").mkdir(exist_ok=True)
        (root / "models").symlink_to(folder / "models")
        spec = validate(ExperimentSpec, _experiment(root, episodes, rounds, epochs, overlapped))
        self.execution = Execution(spec, Context.at(root), Console(io.StringIO()), None, root / "log")
        ended: list[float] = []
        try:
            run = Run(
                spec,
                self.execution.artifact,
                Concurrent(self.execution, lambda run: lambda label, step, request: run(label, step, request).artifact),
                on_round=lambda number, artifacts: ended.append(time.monotonic()),
            )
            run.execute()
        finally:
            self.execution.second.close()
            self.execution.context.warm.close()
        self.per_hour = 3600 * (rounds - 2) / (ended[-2] - ended[0]) if rounds > 2 else 0.0

    def seconds(self, label: str) -> float:
        return self.execution.done[label].seconds


def _experiment(root: Path, episodes: int, rounds: int, epochs: int, overlapped: int) -> dict[str, Any]:
    return {
        "name": "overlap",
        "root": str(root),
        "rounds": rounds,
        "allow": ["tests"],
        "model": {"name": "tiny", "source": "random"},
        "environment": {"_target_": "tests.benchmarks.overlap.Waiting", "train": episodes},
        "reward": {"_target_": "components.rewards.rules.outcome.Outcome"},
        "filter": {"_target_": "components.filters.everything.Everything"},
        "algorithm": {
            "name": "grpo",
            "baseline": "none",
            "scale": "none",
            "epochs": epochs,
            "learning_rate": 1e-6,
        },
        "collect": {"scenarios": episodes, "group_size": 1, "concurrency": AT_ONCE, "overlap": overlapped},
        "agent": {"max_turns": TURNS, "max_tokens": 8},
        "deploy": {"mode": "none"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what collecting a round while another is trained brings.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="that one collection, and one training, take")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, nothing else")
    options = parser.parse_args()
    if options.rounds < 3:
        parser.error("--rounds: at least 3, of which those between the first and the last are measured")
    found = measure(options.rounds, options.seconds)
    if not options.json:
        print(
            f"collect {found['collect_seconds']:.0f} s, train {found['train_seconds']:.0f} s: "
            f"{found['rounds_per_hour']:.0f} rounds an hour, {found['rounds_per_hour_overlapped']:.0f} overlapped, "
            f"{found['overlap_speedup']:.2f} times as many"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
