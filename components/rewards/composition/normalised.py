"""A reward less a mean, over a standard deviation.

    r' = (r - mean) / (std + epsilon)       steps: s'_t = s_t / (std + epsilon), and -mean / (std + epsilon) at the last

`over: group`     mean and std of the scored episodes of the scenario
`over: running`   of all scored episodes of the collection up to this group, itself included

std is that of the population; where it is 0, r' is 0 (with `centre`), as nothing tells these episodes apart. Running
statistics follow the order of the collection, whatever the order in which judgements come, and begin anew with each
judge stage. They are found after judging (`Composed.settling`), from the rewards that are kept: a stage that was killed
and goes on finds the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import Problem, SpecError
from components.rewards.composition.composed import Composed, Parts, Value
from components.rewards.composition.moments import Moments
from components.specs.registered import registered
from components.trajectories.schema import Failure, Trajectory


@registered("reward.normalised")
class Normalised(Composed):
    """Rewards of different size made comparable.

    Args:
        reward: Any reward; its own value is the component `reward`.
        over: `group` or `running`. Over a group, every episode of an evaluation, which plays each scenario once, has 0.
        centre: Whether the mean is taken off.
        scale: Whether it is divided by the standard deviation.
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
        self._seen = Moments()

    def with_fresh_statistics(self) -> Normalised:
        other = super().with_fresh_statistics()
        assert isinstance(other, Normalised)
        other._seen = Moments()
        return other

    def values(self, group: Sequence[Trajectory], scores: Sequence[Parts]) -> list[Value | Failure]:
        seen = self._seen if self.over == "running" else Moments()
        rewards = [parts["reward"].reward or 0.0 for parts in scores]
        for reward in rewards:
            seen.add(reward)
        mean = seen.mean if self.centre else 0.0
        divisor = seen.std + self.epsilon if self.scale and seen.std else 1.0
        found: list[Value | Failure] = []
        for reward, parts in zip(rewards, scores, strict=True):
            steps = [step / divisor for step in parts["reward"].step_rewards]
            if steps:
                steps[-1] -= mean / divisor
            found.append(Value((reward - mean) / divisor, steps))
        return found
