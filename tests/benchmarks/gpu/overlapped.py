"""A run like the quickstart's, with collection and training overlapped (`collect.overlap=1`), by the stages of a run
without Prefect and MLflow.

The environment is the quickstart's shop. Random weights never succeed there, so the reward is a number that depends on
the episode's tokens: groups have a spread, and every training takes gradient steps.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from typing import Any

from tests.benchmarks.gpu.setup import ALPHA, RANK, Report, Setup

GROUP = 4
TURNS = 3


class TokenReward:
    """Reward in [0, 1) that depends on the tokens of an episode alone."""

    def __call__(self, trajectory: Any) -> float:
        tokens = ",".join(str(token) for history in trajectory.histories for token in history.token_ids)
        return int(hashlib.sha256(tokens.encode()).hexdigest()[:8], 16) / 2**32


def run(setup: Setup, report: Report) -> None:
    """Run the rounds. Report the seconds of each stage, and those in which it ran beside another one."""
    from components.specs import validate
    from flows.execution.executor import Execution
    from flows.execution.overlap import Concurrent
    from flows.experiment.spec import ExperimentSpec
    from flows.recipes.run import Run
    from flows.stages.base import Context
    from flows.terminal.console import Console, hush

    hush()
    root = setup.folder / "overlapped"
    root.mkdir()
    spec = validate(ExperimentSpec, experiment(setup, root))
    execution = Execution(spec, Context.at(root), Console(io.StringIO()), None, root / "log")

    def on_round(number: int, artifacts: Any) -> None:
        report.update(rounds_done=number, **stages(execution))

    began = time.monotonic()
    try:
        background = Concurrent(execution, lambda run: lambda label, step, request: run(label, step, request).artifact)
        Run(spec, execution.artifact, background, on_round=on_round).execute()
    finally:
        execution.close()
        execution.context.warm.close()
    episodes = GROUP * setup.shape.scenarios
    report.update(seconds=round(time.monotonic() - began, 2), episodes_per_round=episodes, **stages(execution))


def stages(execution: Any) -> dict[str, Any]:
    """Return seconds and overlap of the finished stages, and the sums that show that the trainings took place."""
    done = execution.done
    trainings = [stage.artifact.metrics for label, stage in done.items() if label.startswith("train[")]
    return {
        "stage_seconds": {label: round(stage.seconds, 2) for label, stage in done.items()},
        "overlapped_seconds": {
            label: round(stage.overlapped_seconds, 2) for label, stage in done.items() if stage.overlapped_seconds
        },
        "trainings": len(trainings),
        "grad_norm": [round(metrics.get("grad_norm", 0.0), 6) for metrics in trainings],
        "kl_sampler": [metrics.get("kl_sampler") for metrics in trainings],
    }


def experiment(setup: Setup, root: Any) -> dict[str, Any]:
    """Return the configuration of the run."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return {
        "name": "overlapped",
        "root": str(root),
        "rounds": setup.shape.rounds,
        "allow": ["tests"],
        "model": {
            "name": str(setup.base_dir),
            "dtype": setup.dtype,
            "device": setup.device,
            "max_length": 2048,
            "lora": {"rank": RANK, "alpha": ALPHA},
        },
        "environment": {"_target_": "components.environments.worlds.shop.Shop"},
        "reward": {"_target_": "tests.benchmarks.gpu.overlapped.TokenReward"},
        "filter": {"_target_": "components.filters.everything.Everything"},
        "algorithm": {"name": "grpo", "learning_rate": 1e-6},
        "collect": {
            "scenarios": setup.shape.scenarios,
            "group_size": GROUP,
            "concurrency": GROUP * setup.shape.scenarios,
            "overlap": 1,
        },
        "evaluate": {"scenarios": 2},
        "agent": {"max_turns": TURNS, "max_tokens": 32 if setup.size == "qwen3" else 8},
        "deploy": {"mode": "none"},
    }
