"""Base classes of rewards that ask judge models, and the combination of several opinions."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from components.errors import JudgeError, ResourceError
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.spec import JudgeModel, labels, several
from components.rewards.protocol import RewardResources
from components.trajectories.schema import Failure, Score, Trajectory

SPREAD = "spread"
"""Component with the standard deviation of the scores of several judges (of the population)."""


class JudgeReward:
    """Base class of rewards that ask one judge model, or several.

    Args:
        model: Judge model (`judge_model`), or a list of them.
    """

    def __init__(self, model: JudgeModel | list[JudgeModel]):
        self.models = several(model)
        self._clients: dict[str, JudgeClient] = {}

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for stage keys: what determines the judges' answers, without addresses and timeouts."""
        return {**arguments, "model": [spec.key_part() for spec in several(arguments["model"])]}

    def use(self, resources: RewardResources) -> None:
        """Create the clients. Raises ResourceError if an API key is not in the environment."""
        for name, spec in zip(labels(self.models), self.models, strict=True):
            self._clients[name] = JudgeClient(spec, resources)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    @property
    def askers(self) -> Mapping[str, JudgeClient]:
        """Return the clients of the judges, by unique name. Raises ResourceError before `use`."""
        if not self._clients:
            raise ResourceError("the judges have no clients yet: call use(resources) first")
        return self._clients


@dataclass(frozen=True)
class Opinion:
    """Opinion of one judge on one episode."""

    score: float | None
    """Score from 0 to 1; None if the judge gave none, with the reason in `reason`."""
    parts: dict[str, float] = field(default_factory=dict)
    """Components of the score."""
    explanation: str = ""
    cost: float | None = 0.0
    """Cost; None if unknown."""
    reason: str = ""
    turns: list[float] = field(default_factory=list)
    """Score of each turn, if the judge scores turns."""


def combine_opinions(trajectory: Trajectory, opinions: Mapping[str, Opinion]) -> Score:
    """Return the mean of the judges' opinions, by name; an opinion without a score does not count. With several judges,
    the components include each one's score, `judge/NAME`, and their spread. Step rewards are not set; the caller adds
    them."""
    counted = {name: opinion for name, opinion in opinions.items() if opinion.score is not None}
    cost = total_cost(opinions.values())
    usable = counted or opinions
    names = dict.fromkeys(name for opinion in usable.values() for name in opinion.parts)
    parts = {name: fmean(opinion.parts[name] for opinion in usable.values() if name in opinion.parts) for name in names}
    if not counted:
        reason = (
            "; ".join(opinion.reason for opinion in opinions.values() if opinion.reason) or "the judge gave no score"
        )
        return Score(trajectory.id, None, parts, cost=cost, failure=Failure(JudgeError.boundary, "JudgeError", reason))
    scores = {name: opinion.score for name, opinion in counted.items() if opinion.score is not None}
    if len(opinions) > 1:
        parts |= {f"judge/{name}": score for name, score in scores.items()}
    if len(scores) > 1:
        parts[SPREAD] = pstdev(scores.values())
    texts = {name: opinion.explanation for name, opinion in counted.items()}
    text = (
        next(iter(texts.values())) if len(texts) == 1 else "\n".join(f"{name}: {text}" for name, text in texts.items())
    )
    return Score(trajectory.id, fmean(scores.values()), parts, explanation=text, cost=cost)


def total_cost(opinions: Any) -> float | None:
    """Return the sum of the costs; None if one is unknown."""
    costs = [opinion.cost for opinion in opinions]
    return None if any(cost is None for cost in costs) else sum(costs)


class EpisodeJudgeReward(JudgeReward, ABC):
    """Base class of rewards that judge each episode by itself."""

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Return the Score of a trajectory. Raises ResourceError before `use`, BudgetExceeded."""
        clients = self.askers
        opinions = await asyncio.gather(*(self.opinion(client, trajectory) for client in clients.values()))
        return self.score(trajectory, dict(zip(clients, opinions, strict=True)))

    @abstractmethod
    async def opinion(self, client: JudgeClient, trajectory: Trajectory) -> Opinion:
        """Return the opinion of one judge."""

    def score(self, trajectory: Trajectory, opinions: Mapping[str, Opinion]) -> Score:
        """Return the Score that the opinions, by judge, combine to."""
        return combine_opinions(trajectory, opinions)
