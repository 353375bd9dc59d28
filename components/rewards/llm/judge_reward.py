"""What rewards share that ask models: who is asked, and what becomes of what several of them say."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from components.errors import JudgeError, ResourceError
from components.rewards.llm.spec import JudgeModel, labels, several
from components.rewards.protocol import Means
from components.trajectories.schema import Failure, Score, Trajectory

if TYPE_CHECKING:
    from components.rewards.llm.client import JudgeClient

SPREAD = "spread"
"""Component: the standard deviation of the scores of several judges (of the population)."""


class JudgeReward:
    """Base of rewards that ask one model, or several.

    Args:
        model: Who judges (`judge_model`), or a list of them.
    """

    def __init__(self, model: JudgeModel | list[JudgeModel]):
        self.models = several(model)
        self._askers: dict[str, JudgeClient] = {}

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """For stage keys: what decides the judges' answers, not where they are or how patient we are."""
        return {**arguments, "model": [one.key_part() for one in several(arguments["model"])]}

    def use(self, means: Means) -> None:
        """Raises ResourceError where a key is not in the environment."""
        from components.rewards.llm.client import JudgeClient

        for name, one in zip(labels(self.models), self.models, strict=True):
            self._askers[name] = JudgeClient(one, means)

    def close(self) -> None:
        for one in self._askers.values():
            one.close()

    @property
    def askers(self) -> Mapping[str, JudgeClient]:
        """The judges, by names that differ. Raises ResourceError before `use`."""
        if not self._askers:
            raise ResourceError("the judge is not at hand yet: call use(means) first")
        return self._askers


@dataclass(frozen=True)
class Opinion:
    """What one judge says of one episode."""

    score: float | None
    """From 0 to 1; None: it gave none, and `why` says why."""
    parts: dict[str, float] = field(default_factory=dict)
    """Components of the score."""
    said: str = ""
    cost: float | None = 0.0
    """None: not known."""
    why: str = ""
    turns: list[float] = field(default_factory=list)
    """Score of each turn, where it scores turns."""


def combine_opinions(trajectory: Trajectory, opinions: Mapping[str, Opinion]) -> Score:
    """The mean of what the judges say, by name; one that gave no score has no part in it. Of several also each one's
    score, `judge/NAME`, and their spread. Step rewards are left to the caller: they are not set."""
    counted = {name: one for name, one in opinions.items() if one.score is not None}
    cost = total_cost(opinions.values())
    read = counted or opinions
    names = dict.fromkeys(name for one in read.values() for name in one.parts)
    parts = {name: fmean(one.parts[name] for one in read.values() if name in one.parts) for name in names}
    if not counted:
        why = "; ".join(one.why for one in opinions.values() if one.why) or "the judge gave no score"
        return Score(trajectory.id, None, parts, cost=cost, failure=Failure(JudgeError.boundary, "JudgeError", why))
    scores = {name: one.score for name, one in counted.items() if one.score is not None}
    if len(opinions) > 1:
        parts |= {f"judge/{name}": score for name, score in scores.items()}
    if len(scores) > 1:
        parts[SPREAD] = pstdev(scores.values())
    said = {name: one.said for name, one in counted.items()}
    text = next(iter(said.values())) if len(said) == 1 else "\n".join(f"{name}: {one}" for name, one in said.items())
    return Score(trajectory.id, fmean(scores.values()), parts, explanation=text, cost=cost)


def total_cost(opinions: Any) -> float | None:
    """The sum; not known where one is not."""
    costs = [one.cost for one in opinions]
    return None if any(one is None for one in costs) else sum(costs)


class EpisodeJudgeReward(JudgeReward, ABC):
    """Base of rewards that ask about each episode by itself."""

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Raises ResourceError before `use`, BudgetSpent."""
        askers = self.askers
        found = await asyncio.gather(*(self.opinion(one, trajectory) for one in askers.values()))
        return self.score(trajectory, dict(zip(askers, found, strict=True)))

    @abstractmethod
    async def opinion(self, client: JudgeClient, trajectory: Trajectory) -> Opinion:
        """What one judge says."""

    def score(self, trajectory: Trajectory, opinions: Mapping[str, Opinion]) -> Score:
        return combine_opinions(trajectory, opinions)
