"""Aggregation of several sources of the same judgement, such as people, an LLM judge and the environment.

    reward = Σ weight_s · v_s / Σ weight_s      over the sources s that have scored the episode

So people need not score every episode; the other sources score the rest. The agreement of the sources is among the
metrics of the stage (`agreement`), and shows how well one source can replace another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import FiniteFloat

from components.errors import Problem, SpecError
from components.rewards.agreement import between
from components.rewards.judge import ask
from components.rewards.protocol import AskingReward, ModelReward, RewardResources
from components.specs.registered import registered
from components.trajectories.schema import Failure, Score, Trajectory


@registered("reward.aggregated")
class Aggregated:
    """Weighted mean of its sources, each on a scale from 0 to 1.

    Args:
        sources: Rewards by name: `{human: {_target_: ...}, environment: {_target_: ...}}`.
        weights: Weights by source name, 0 or more; the default is 1. A source of weight 0 is computed and compared, but
            does not count.

    The components of a Score are the sources' values, by name. An episode that no source with a weight has scored is
    unscored with the failure of the first such source.
    """

    def __init__(self, sources: dict[str, Any], weights: dict[str, FiniteFloat] | None = None):
        self.weights = {name: (weights or {}).get(name, 1.0) for name in sources}
        if unknown := [name for name in weights or {} if name not in sources]:
            known = ", ".join(sources) or "none"
            raise SpecError([Problem(f"reward.weights.{unknown[0]}", f"there is no such source; there are {known}")])
        for name, weight in self.weights.items():
            if weight < 0:
                raise SpecError([Problem(f"reward.weights.{name}", f"{weight:g}: expected at least 0")])
        if not any(self.weights.values()):
            raise SpecError([Problem("reward.sources", "no source has a weight above 0; expected one at least")])
        self.sources = sources

    def use(self, resources: RewardResources) -> None:
        """Pass the resources on to the sources that compute with a model, or ask one."""
        for source in self.sources.values():
            if isinstance(source, ModelReward):
                source.use(resources)

    def close(self) -> None:
        """Close the sources that hold resources open."""
        for source in self.sources.values():
            if isinstance(source, AskingReward):
                source.close()

    async def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return one score for each trajectory."""
        results = await asyncio.gather(*(ask(source, group) for source in self.sources.values()))
        scores_by_source = dict(zip(self.sources, results, strict=True))
        return [
            self._score(trajectory.id, {name: scores[i] for name, scores in scores_by_source.items()})
            for i, trajectory in enumerate(group)
        ]

    def agreement(self, scores: Iterable[Score]) -> dict[str, float]:
        """Return the agreement of the sources on the episodes of a stage (`components.rewards.agreement.between`)."""
        judged: dict[str, dict[str, float]] = {name: {} for name in self.sources}
        for score in scores:
            for name in self.sources:
                if name in score.components:
                    judged[name][score.trajectory_id] = score.components[name]
        return between(judged)

    def _score(self, episode: str, source_scores: Mapping[str, Score]) -> Score:
        parts = {name: score.reward for name, score in source_scores.items() if score.reward is not None}
        counted = {name: self.weights[name] for name in parts if self.weights[name]}
        costs = [score.cost for score in source_scores.values()]
        fields: dict[str, Any] = {
            "components": parts,
            "explanation": "\n".join(
                filter(None, (_explanation(name, score) for name, score in source_scores.items()))
            ),
            "cost": None if None in costs else sum(costs),
        }
        if not counted:
            failures = [score.failure for name, score in source_scores.items() if self.weights[name] and score.failure]
            failure = failures[0] if failures else Failure("judge", "JudgeError", "no source has scored it")
            return Score(episode, None, failure=failure, **fields)
        total = sum(weight * parts[name] for name, weight in counted.items())
        return Score(episode, total / sum(counted.values()), **fields)


def _explanation(name: str, score: Score) -> str:
    """Return the explanation of a source, or its failure if the source broke."""
    if score.failure is not None and score.failure.boundary == "judge":
        return f"{name}: unscored: {score.failure.kind}: {score.failure.message}"
    return f"{name}: {score.explanation}" if score.explanation else ""
