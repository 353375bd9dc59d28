"""Reward model: judged episodes become a model that judges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from components.algorithms.spec import RewardAlgorithmSpec
from components.artifacts import Draft
from components.models.spec import ModelSpec
from flows.stages.base import Context, Inputs, Stage, StageSpec
from flows.stages.train import steps

REWARD_MODEL_VERSION = 1
"""Layout of a reward model: adapter/, heads.safetensors, reward_model.json, and what is needed to train it further."""


class RewardModelStage(StageSpec):
    model: ModelSpec
    algorithm: RewardAlgorithmSpec
    save_every: float = Field(30.0, ge=0)
    """Seconds between two saves of the unfinished training."""

    def key_part(self) -> dict[str, Any]:
        return {
            "model": self.model.model_dump(mode="json", exclude={"device"}),
            "algorithm": self.algorithm.model_dump(mode="json"),
        }


def train_reward(spec: RewardModelStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes a reward model. Inputs: `trajectories`, `scores`; `start`, the checkpoint whose adapter it begins with."""
    from components.algorithms.train_reward import train_reward_model
    from components.models.weights import prepare
    from components.trajectories.store import load_scored, read_scores

    scores = inputs["scores"].path / "scores.parquet"
    trajectories = load_scored(inputs["trajectories"].path / "trajectories.parquet", scores, None)
    total = steps(spec.algorithm, len(trajectories))
    done = 0

    def on_step(values: Mapping[str, float]) -> None:
        nonlocal done
        done += 1
        context.progress(done, max(total, done), values)

    context.progress(0, total)
    assert context.scratch is not None
    return train_reward_model(
        spec.algorithm,
        spec.model,
        prepare(spec.model, context.cache),
        trajectories,
        list(read_scores(scores)),
        start=inputs["start"].path if "start" in inputs else None,
        out=draft.path,
        scratch=context.scratch,
        seed=context.seed,
        on_step=on_step,
        save_every=spec.save_every,
    )


STAGE = Stage(
    "reward_model", 1, RewardModelStage, "reward_model", REWARD_MODEL_VERSION, train_reward, volatile=("log.jsonl",)
)
