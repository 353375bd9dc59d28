"""Reward model stage: trains a reward model on scored episodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from components.algorithms.choices import AnyRewardAlgorithmSpec
from components.artifacts import Draft
from components.compute.spec import SaveEvery
from components.models.spec import ModelSpec
from flows.stages.base import Context, Inputs, Stage, StageSpec, TrainingProgress
from flows.stages.train import CHECKPOINT_FILES, OPTIONAL_FILES

if TYPE_CHECKING:
    from components.algorithms.trainer import JudgedCollection

REWARD_MODEL_VERSION = 2
"""Version of the layout: adapter/, heads.safetensors, reward_model.json, and the state for further training; version 2
adds scenarios.json."""


class RewardModelStage(StageSpec):
    model: ModelSpec
    algorithm: AnyRewardAlgorithmSpec
    save_every: SaveEvery = "auto"
    """Seconds between two saves of the unfinished training (`compute.save_every`)."""

    def key_part(self) -> dict[str, Any]:
        return {
            "model": self.model.key_part(),
            "algorithm": self.algorithm.key_part(),
        }


def train_reward(spec: RewardModelStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write a reward model. Inputs: `trajectories`, `scores`; `trajectories-N`, `scores-N`, those of N collections ago,
    to train on again; `predicted-N`, other scores of that collection: only scenarios that these order wrongly are used;
    `start`, the checkpoint whose adapter initializes the model, or the reward model to train
    further."""
    from components.algorithms.reward_models.trainer import train_reward_model
    from components.algorithms.trainer import RewardTrainingRequest
    from components.models.weights import prepare

    judged = [_judged(inputs), *(_judged(inputs, ago) for ago in range(1, collections(inputs)))]
    assert context.scratch is not None
    progress = TrainingProgress(context.progress)
    request = RewardTrainingRequest(
        model=spec.model,
        base_dir=prepare(spec.model, context.cache),
        judged=judged,
        start=inputs["start"].path if "start" in inputs else None,
        out=draft.path,
        scratch=context.scratch,
        seed=context.seed,
        on_step=progress.on_step,
        on_total=progress.on_total,
        save_every=spec.save_every,
        strategy=context.strategy,
    )
    return train_reward_model(spec.algorithm, request)


def collections(inputs: Iterable[str]) -> int:
    """Return the number of collections among the names of inputs."""
    return sum(name.startswith("trajectories") for name in inputs)


def _judged(inputs: Inputs, ago: int = 0) -> JudgedCollection:
    """Return the scored episodes of `ago` collections ago, with unique ids: collections may share scenarios."""
    from components.algorithms.trainer import JudgedCollection
    from components.trajectories.store import load_scored, read_scores

    suffix = f"-{ago}" if ago else ""
    id_suffix = f"@-{ago}" if ago else ""
    path = inputs[f"scores{suffix}"].path / "scores.parquet"
    trajectories = load_scored(inputs[f"trajectories{suffix}"].path / "trajectories.parquet", path, None)
    return JudgedCollection(
        [replace(trajectory, id=f"{trajectory.id}{id_suffix}") for trajectory in trajectories],
        [replace(score, trajectory_id=f"{score.trajectory_id}{id_suffix}") for score in read_scores(path)],
        {f"{score.trajectory_id}{id_suffix}": score.reward for score in read_scores(predicted.path / "scores.parquet")}
        if (predicted := inputs.get(f"predicted{suffix}"))
        else None,
    )


STAGE = Stage(
    "reward_model",
    4,
    RewardModelStage,
    "reward_model",
    REWARD_MODEL_VERSION,
    train_reward,
    files={
        **CHECKPOINT_FILES,
        "heads.safetensors": "linear heads that predict the scores",
        "reward_model.json": "base model, heads and their scales",
        "scenarios.json": "training and held-out scenarios",
    },
    optional=OPTIONAL_FILES,
    volatile=("log.jsonl",),
    inputs={
        "trajectories[-N]": "trajectories or dataset",
        "scores[-N]": "scores or dataset",
        "predicted[-N]": "scores",
        "start": "checkpoint or reward_model",
    },
    order=60,
    unit="steps",
    distributed=True,
    size=lambda request: collections(request.inputs),
    lineage="step",
)
