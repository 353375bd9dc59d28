"""RULER in a loop: `ruler` judges the groups of `gather` in their stage, `ruler_score` those that a program has."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from components.aio import in_thread
from components.errors import JudgeError, SpecError
from components.rewards.llm.spec import judge_model
from components.specs import Target
from components.trajectories import schema
from flows.loop.groups import Call, RolloutGroup, Transcript

logger = logging.getLogger(__name__)

INDEPENDENT = "independent_reward"
"""Metric of a trajectory with the reward that it had before."""


def ruler(judge: Any, *, rubric: str | None = None) -> Target:
    """Return the reward of `gather(after_each=...)`: relative scores from 0 to 1 within each group, by a judge that
    sees its episodes side by side.

    judge: LiteLLM's name (`openai/o3`), the URL of a server, or the data of a judge model. rubric: criteria for the
    better episode. Raises SpecError, and ResourceError if the server does not name its model."""
    arguments = {"model": judge_model(judge)} | ({} if rubric is None else {"rubric": rubric})
    return Target.model_validate({"_target_": "components.rewards.judges.ruler.Ruler", **arguments})


def ruler_score(group: Iterable[Any], judge: Any, *, rubric: str | None = None) -> RolloutGroup:
    """Return the group with the relative scores of a judge as rewards. The reward of before is kept as the metric
    `independent_reward`; a failed trajectory has no reward. judge, rubric: as of `ruler`.

    Raises JudgeError if the judge scored no trajectory, SpecError and ResourceError."""
    from components.models.spec import ModelSpec
    from components.models.weights import CACHE
    from components.rewards.judge import judge as apply
    from components.rewards.protocol import RewardResources
    from flows.terminal.arguments import DEFAULT_ROOT

    members = list(group)
    episodes = [_episode(member, number) for number, member in enumerate(members)]
    model = judge_model(judge)
    if model.frozen_model is not None or model.asks_policy:
        text = f"{model.name}: computes with a loaded model; expected a LiteLLM name, a URL, or gather(after_each=...)"
        raise SpecError.at("judge", text)
    reward = ruler(model, rubric=rubric).build()
    reward.use(RewardResources(DEFAULT_ROOT / CACHE, ModelSpec(name="none", source="random")))
    try:
        scores = list(apply(reward, episodes))
    finally:
        reward.close()
    if members and not any(score.reward is not None for score in scores):
        reasons = [score.failure.message for score in scores if score.failure is not None]
        raise JudgeError(
            f"{model.label} scored none of the {len(members)} trajectories: {reasons[0] if reasons else ''}"
        )
    return RolloutGroup(_rewarded(*pair) for pair in zip(members, scores, strict=True))


async def ruler_score_async(group: Iterable[Any], judge: Any, *, rubric: str | None = None) -> RolloutGroup:
    """Return `ruler_score` of a group, without blocking the event loop."""
    members = list(group)
    scored: RolloutGroup = await in_thread(lambda: ruler_score(members, judge, rubric=rubric))
    return scored


def _episode(member: Any, number: int) -> schema.Trajectory:
    """Return a member as an episode of one scenario: a judge compares attempts at one task."""
    if isinstance(member, Call) or not isinstance(member, Transcript | schema.Trajectory):
        kind = "a rollout that was not played" if isinstance(member, Call) else type(member).__name__
        raise SpecError.at(
            "loop.ruler_score", f"{kind}; expected trajectories: those of loop.gather, or loop.Transcript"
        )
    scenario = schema.Scenario("group", {}, "train")
    episode = member.episode(scenario, number) if isinstance(member, Transcript) else member
    return replace(episode, id=f"group/{number}", scenario=scenario, sample=number)


def _rewarded(member: Any, score: schema.Score) -> Any:
    before = {} if member.reward is None else {INDEPENDENT: float(member.reward)}
    return replace(member, reward=score.reward, metrics={**member.metrics, **before})
