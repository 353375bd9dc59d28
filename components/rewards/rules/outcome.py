"""Outcome reward: success of the episode, minus costs of its length and errors.

    reward = success
           + progress_weight · progress · (1 - success)
           - turn_cost · turns
           - invalid_cost · invalid_actions
           - repetition_cost · repetition

`success` is 1 or 0, `progress` is between 0 and 1, `repetition` is the share of the n-grams of sampled tokens that
repeat an earlier one of the same message (1 - distinct-n of arXiv:1510.03055). With the defaults the reward equals the
success.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Annotated, Any

from pydantic import Field

from components.errors import JudgeError
from components.rewards.rules.repetition import repetition
from components.specs.registered import registered
from components.trajectories.schema import Failure, Score, Trajectory


@registered("reward.outcome")
class Outcome:
    """Success as reported by the environment, minus costs.

    Args:
        turn_cost: Penalty for each assistant message (`metrics["turns"]`); 0 or more.
        invalid_cost: Penalty for each action that the environment rejected as invalid (`invalid_actions`, in metrics or
            outcome); 0 or more.
        progress_weight: Partial credit of an unsuccessful episode for `outcome["progress"]` = 1; 0 to 1, so that it
            never exceeds a success. With 0, progress is not read.
        repetition_cost: Penalty for full repetition (`repetition` = 1); 0 or more.
        repetition_ngram: Tokens of one n-gram.

    The terms of the sum are the components of the Score, with their signs. If a required count or progress is missing,
    the episode is unscored with that reason, except that an episode cut off before the environment reported anything
    has no progress.
    """

    highest = 1.0

    def __init__(
        self,
        turn_cost: Annotated[float, Field(ge=0)] = 0.0,
        invalid_cost: Annotated[float, Field(ge=0)] = 0.0,
        progress_weight: Annotated[float, Field(ge=0, le=1)] = 0.0,
        repetition_cost: Annotated[float, Field(ge=0)] = 0.0,
        repetition_ngram: Annotated[int, Field(ge=1)] = 3,
    ):
        self.turn_cost = turn_cost
        self.invalid_cost = invalid_cost
        self.progress_weight = progress_weight
        self.repetition_cost = repetition_cost
        self.repetition_ngram = repetition_ngram

    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return one score for each trajectory."""
        return [self._score(trajectory) for trajectory in group]

    def _score(self, trajectory: Trajectory) -> Score:
        success = float(trajectory.success)
        parts = {"success": success}
        try:
            if self.progress_weight:
                parts["progress"] = self.progress_weight * _progress(trajectory) * (1.0 - success)
            if self.turn_cost:
                parts["turns"] = -self.turn_cost * _count(trajectory, "turns")
            if self.invalid_cost:
                parts["invalid_actions"] = -self.invalid_cost * _count(trajectory, "invalid_actions")
            if self.repetition_cost:
                parts["repetition"] = -self.repetition_cost * repetition(trajectory, self.repetition_ngram)
        except JudgeError as error:
            return Score(trajectory.id, None, failure=Failure.of(error, error.boundary))
        return Score(trajectory.id, sum(parts.values()), parts)


def _count(trajectory: Trajectory, name: str) -> float:
    """Return a count from the collector's metrics, or else from the environment's outcome."""
    value: Any = trajectory.metrics.get(name, trajectory.outcome.get(name))
    if not isinstance(value, Real):
        raise JudgeError(f"neither metrics nor outcome hold a number '{name}': found {value!r}. Set its cost to 0")
    return float(value)


def _progress(trajectory: Trajectory) -> float:
    if not trajectory.outcome:
        return 0.0
    value = trajectory.outcome.get("progress")
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise JudgeError(f"outcome['progress'] is {value!r}, expected a number from 0 to 1. Set progress_weight to 0")
    return float(value)
