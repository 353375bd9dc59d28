"""Train: scored and selected trajectories become a new checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from components.algorithms.spec import AlgorithmSpec, GRPOSpec, RewardAlgorithmSpec
from components.artifacts import Draft
from components.models.spec import ModelSpec
from flows.stages.base import Context, Inputs, Stage, StageSpec

CHECKPOINT_VERSION = 1
"""Layout of a checkpoint: adapter/, optimizer.safetensors, trainer.json, log.jsonl."""


class TrainStage(StageSpec):
    model: ModelSpec
    algorithm: AlgorithmSpec
    save_every: float = Field(30.0, ge=0)
    """Seconds between two saves of the unfinished training."""

    def key_part(self) -> dict[str, Any]:
        return {
            "model": self.model.model_dump(mode="json", exclude={"device"}),
            "algorithm": self.algorithm.model_dump(mode="json"),
        }


def train(spec: TrainStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes a checkpoint. Inputs: `trajectories`, `scores`, `selection`; `start`, the checkpoint to go on from;
    `reference`, the checkpoint from which the KL is measured (the base model where there is none)."""
    from components.algorithms.train import train as run
    from components.models.weights import prepare
    from components.trajectories.store import load_scored

    trajectories = load_scored(
        inputs["trajectories"].path / "trajectories.parquet",
        inputs["scores"].path / "scores.parquet",
        inputs["selection"].path / "selection.parquet",
    )
    total = steps(spec.algorithm, len(trajectories))
    done = 0

    def on_step(values: Mapping[str, float]) -> None:
        nonlocal done
        done += 1
        context.progress(done, max(total, done), values)

    context.progress(0, total)
    assert context.scratch is not None
    return run(
        spec.algorithm,
        spec.model,
        prepare(spec.model, context.cache),
        trajectories,
        start=inputs["start"].path if "start" in inputs else None,
        reference=inputs["reference"].path if "reference" in inputs else None,
        out=draft.path,
        scratch=context.scratch,
        seed=context.seed,
        on_step=on_step,
        warm=context.warm.trainer,
        save_every=spec.save_every,
    )


def steps(algorithm: AlgorithmSpec | RewardAlgorithmSpec, trajectories: int) -> int:
    """Gradient steps that a train stage takes at most, for the progress that is shown."""
    if isinstance(algorithm, GRPOSpec):
        return algorithm.epochs * algorithm.minibatches
    return algorithm.epochs * -(-trajectories // algorithm.batch_size)


STAGE = Stage("train", 2, TrainStage, "checkpoint", CHECKPOINT_VERSION, train, volatile=("log.jsonl",))
