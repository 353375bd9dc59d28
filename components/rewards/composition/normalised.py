"""Standardization of a reward: minus a mean, divided by a standard deviation.

    r' = (r - mean) / (std + epsilon)       steps: s'_t = s_t / (std + epsilon), and -mean / (std + epsilon) at the last

`over: group` mean and std of the scored episodes of the scenario `over: running` of all scored episodes of the
collection up to and including this group

std is that of the population. If it is 0, r' is 0 (with `centre`), as the episodes do not differ. Running statistics
follow the order of the collection, whatever order judgements arrive in, and start anew with each judge stage. They are
computed after judging (`Composed.settling`) from the stored rewards, so a stage that is killed and resumed gets the
same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import Problem, SpecError
from components.rewards.composition.composed import Composed, CompositionResult, Parts
from components.specs.registered import registered
from components.trajectories.schema import Failure, Trajectory


class Moments:
    """Running moments; without values, both are 0."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        """Update the moments with a value."""
        self.count += 1
        difference = value - self.mean
        self.mean += difference / self.count
        self._squares += difference * (value - self.mean)

    @property
    def std(self) -> float:
        """Standard deviation of the population; 0 for a single value."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0


@registered("reward.normalised")
class Normalised(Composed):
    """Reward standardized over a group or over the collection.

    Args:
        reward: Any reward; its raw value is the component `reward`.
        over: `group` or `running`. Over a group, every episode of an evaluation, which plays each scenario once,
            gets 0.
        centre: Subtract the mean.
        scale: Divide by the standard deviation.
        epsilon: Added to the standard deviation.
    """

    def __init__(
        self,
        reward: Any,
        over: Literal["group", "running"] = "group",
        centre: bool = True,
        scale: bool = True,
        epsilon: Annotated[float, Field(gt=0)] = 1e-6,
    ):
        if not centre and not scale:
            raise SpecError(
                [Problem("reward.centre", "false, and so is scale: nothing is normalised; expected one true")]
            )
        self.settles_itself = over == "running"
        super().__init__({"reward": reward})
        self.over, self.centre, self.scale, self.epsilon = over, centre, scale, epsilon
        self._moments = Moments()

    def with_fresh_statistics(self) -> Normalised:
        other = super().with_fresh_statistics()
        assert isinstance(other, Normalised)
        other._moments = Moments()
        return other

    def values(self, group: Sequence[Trajectory], scores: Sequence[Parts]) -> list[CompositionResult | Failure]:
        moments = self._moments if self.over == "running" else Moments()
        rewards = [parts["reward"].reward or 0.0 for parts in scores]
        for reward in rewards:
            moments.add(reward)
        mean = moments.mean if self.centre else 0.0
        divisor = moments.std + self.epsilon if self.scale and moments.std else 1.0
        values: list[CompositionResult | Failure] = []
        for reward, parts in zip(rewards, scores, strict=True):
            steps = [step / divisor for step in parts["reward"].step_rewards]
            if steps:
                steps[-1] -= mean / divisor
            values.append(CompositionResult((reward - mean) / divisor, steps))
        return values
