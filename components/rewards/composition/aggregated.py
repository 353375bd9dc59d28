"""Several sources of the same judgement, such as people, an LLM judge and the environment, as one.

    reward = Σ weight_s · v_s / Σ weight_s      over the sources s that have scored the episode

So people need not read everything: what they have not is left to the others. How far the sources agree is among the
figures of the stage (`agreement`), and says how much one may stand for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import FiniteFloat

from components.errors import Problem, SpecError
from components.rewards.agreement import between
from components.rewards.judge import ask
from components.rewards.protocol import AskingReward, Means, ModelReward
from components.specs.registered import registered
from components.trajectories.schema import Failure, Score, Trajectory


@registered("reward.aggregated")
class Aggregated:
    """The weighted mean of what its sources say, each on a scale from 0 to 1.

    Args:
        sources: Rewards by name: `{human: {_target_: ...}, environment: {_target_: ...}}`.
        weights: By the same names, 0 or more; a source that is not named has 1. A source of weight 0 is asked and
            compared, and does not count.

    The components of a Score are the sources' values, by name. An episode that no source with a weight has scored is
    unscored with the failure of the first of them.
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

    def use(self, means: Means) -> None:
        """Handed on to the sources that compute with a model, or ask one."""
        for source in self.sources.values():
            if isinstance(source, ModelReward):
                source.use(means)

    def close(self) -> None:
        """Handed on to the sources that hold something open."""
        for source in self.sources.values():
            if isinstance(source, AskingReward):
                source.close()

    async def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """One score for each trajectory."""
        found = await asyncio.gather(*(ask(source, group) for source in self.sources.values()))
        asked = dict(zip(self.sources, found, strict=True))
        return [self._score(one.id, {name: scores[i] for name, scores in asked.items()}) for i, one in enumerate(group)]

    def agreement(self, scores: Iterable[Score]) -> dict[str, float]:
        """How far the sources agree on the episodes of a stage (`components.rewards.agreement.between`)."""
        judged: dict[str, dict[str, float]] = {name: {} for name in self.sources}
        for score in scores:
            for name in self.sources:
                if name in score.components:
                    judged[name][score.trajectory_id] = score.components[name]
        return between(judged)

    def _score(self, episode: str, said: Mapping[str, Score]) -> Score:
        parts = {name: score.reward for name, score in said.items() if score.reward is not None}
        counted = {name: self.weights[name] for name in parts if self.weights[name]}
        costs = [score.cost for score in said.values()]
        rest: dict[str, Any] = {
            "components": parts,
            "explanation": "\n".join(filter(None, (_words(name, score) for name, score in said.items()))),
            "cost": None if None in costs else sum(costs),
        }
        if not counted:
            lacking = [score.failure for name, score in said.items() if self.weights[name] and score.failure]
            failure = lacking[0] if lacking else Failure("judge", "JudgeError", "no source has scored it")
            return Score(episode, None, failure=failure, **rest)
        total = sum(weight * parts[name] for name, weight in counted.items())
        return Score(episode, total / sum(counted.values()), **rest)


def _words(name: str, score: Score) -> str:
    """What a source says in words; where something broke, what."""
    if score.failure is not None and score.failure.boundary == "judge":
        return f"{name}: unscored: {score.failure.kind}: {score.failure.message}"
    return f"{name}: {score.explanation}" if score.explanation else ""
