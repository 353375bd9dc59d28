"""Rewards by episode length.

    Length   R = r - α · max(0, len - target)      len: sampled tokens of the episode
    Steps    R = r + β · steps                     steps: turns, or matches of a pattern in the last message

Both are defined as in HelloAgents, with r the accuracy; here r is the reward of `task`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from components.errors import AnswerTooCostly
from components.rewards.composition.composed import ComposedPerEpisode, CompositionResult, Parts, total
from components.rewards.rules.answers import count, last_text, sampled_tokens
from components.rewards.rules.patterns import Pattern
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory


@registered("reward.length")
class Length(ComposedPerEpisode):
    """Penalty for long episodes.

    Args:
        task: Reward r; null is 0.
        alpha: Penalty α for each sampled token above the target; 0 or more.
        target: Number of tokens without a penalty.

    Components: `task` and `length`, the penalty with its sign. A demonstration was not sampled and has no penalty; an
    episode without a token count is unscored.
    """

    def __init__(
        self,
        task: Any = None,
        alpha: Annotated[float, Field(ge=0)] = 0.001,
        target: Annotated[int, Field(ge=0)] = 256,
    ):
        super().__init__({} if task is None else {"task": task})
        self.alpha, self.target = alpha, target

    def value(self, trajectory: Trajectory, parts: Parts) -> CompositionResult:
        tokens = sampled_tokens(trajectory)
        return _with_bonus(trajectory, parts, "length", -self.alpha * max(0.0, tokens - self.target))


@registered("reward.steps")
class Steps(ComposedPerEpisode):
    """Bonus for steps.

    Args:
        task: Reward r; null is 0.
        beta: Bonus β for each step. An unlimited bonus rewards endless steps: set `most`.
        pattern: null counts turns (metric `turns`); a regular expression counts its matches in the last message, such
            as `(?m)^Step \\d+` for steps of reasoning.
        most: Maximum number of steps that count; null is no limit.

    If the pattern times out, no step counts; with β below 0 the episode is then unscored.

    Components: `task` and `steps`, the bonus.
    """

    def __init__(
        self,
        task: Any = None,
        beta: FiniteFloat = 0.1,
        pattern: str | None = None,
        most: Annotated[int, Field(ge=1)] | None = None,
    ):
        super().__init__({} if task is None else {"task": task})
        self.beta, self.most = beta, most
        self._pattern = None if pattern is None else Pattern(pattern)

    def value(self, trajectory: Trajectory, parts: Parts) -> CompositionResult:
        steps = count(trajectory, "turns") if self._pattern is None else self._matches(trajectory)
        return _with_bonus(
            trajectory, parts, "steps", self.beta * (steps if self.most is None else min(steps, self.most))
        )

    def _matches(self, trajectory: Trajectory) -> float:
        assert self._pattern is not None
        try:
            return self._pattern.count(last_text(trajectory))
        except AnswerTooCostly:
            if self.beta < 0:
                raise
            return 0.0


def _with_bonus(trajectory: Trajectory, parts: Parts, name: str, bonus: float) -> CompositionResult:
    """Return the task's reward plus a bonus, which goes to the last step."""
    reward, steps = total([*((1.0, score) for score in parts.values()), (1.0, Score(trajectory.id, bonus))])
    return CompositionResult(reward, steps, {name: bonus})
