"""Judge: a reward for each trajectory."""

from __future__ import annotations

import statistics
from typing import Any

from components.artifacts import Draft
from components.errors import JudgeError
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
    demand_some(scores)
    write_scores(draft.path / "scores.parquet", scores)
    context.progress(len(scores), len(scores))
    return figures(scores)


def demand_some(scores: list[Score]) -> None:
    """Raises JudgeError where the reward could score none of the finished episodes: then it is the reward that is
    broken, and a run that went on would train on nothing."""
    broken = [one.failure for one in scores if one.failure and one.failure.boundary == JudgeError.boundary]
    if broken and all(one.reward is None for one in scores):
        raise JudgeError(
            f"the reward could score none of the {len(broken)} finished episodes; the first one: "
            f"{broken[0].kind}: {broken[0].message}"
        )


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
