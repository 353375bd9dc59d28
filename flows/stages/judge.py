"""Judge: a reward for each trajectory."""

from __future__ import annotations

import statistics
from typing import Any

from components.artifacts import Draft
from components.specs import Target
from components.trajectories.schema import SCHEMA_VERSION, Score
from flows.stages.base import Context, Inputs, Stage, StageSpec


class JudgeStage(StageSpec):
    reward: Target

    def key_part(self) -> dict[str, Any]:
        return {"reward": self.reward.resolved()}


def judge(spec: JudgeStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes `scores.parquet`. Input: `trajectories`."""
    from components.rewards.judge import judge as apply
    from components.trajectories.store import read_trajectories, write_scores

    trajectories = list(read_trajectories(inputs["trajectories"].path / "trajectories.parquet"))
    scores = apply(spec.reward.build(), trajectories)
    write_scores(draft.path / "scores.parquet", scores)
    context.progress(len(scores), len(scores))
    return figures(scores)


def figures(scores: list[Score]) -> dict[str, float]:
    """Mean reward, its spread, components by name, what was unscored, what it cost."""
    rewards = [score.reward for score in scores if score.reward is not None]
    values = {
        "scored": float(len(rewards)),
        "unscored": float(len(scores) - len(rewards)),
        "cost": sum(score.cost for score in scores),
    }
    if rewards:
        values |= {"reward": statistics.fmean(rewards), "reward_std": statistics.pstdev(rewards)}
    for name in sorted({name for score in scores for name in score.components}):
        parts = [score.components[name] for score in scores if name in score.components]
        values[f"components/{name}"] = statistics.fmean(parts)
    return values


STAGE = Stage("judge", 1, JudgeStage, "scores", SCHEMA_VERSION, judge)
