"""Filter by bounds on one number of an episode: reward, turns, tokens, spread of judges.

The number is looked up by name: the reward, a metric of the episode (score components included), then a field of the
environment's outcome. The first match is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from pydantic import FiniteFloat

from components.errors import Problem, SpecError
from components.filters.decisions import decide_each
from components.filters.protocol import Filter, Groups
from components.specs.base import nearest
from components.specs.registered import registered
from components.trajectories.schema import Selection, Trajectory

REWARD = "reward"


@registered("filter.between")
class Between:
    """Filter that drops episodes whose number is below a minimum, above a maximum, or missing.

    Args:
        number: Name of the number: `reward`, `turns`, `sampled_tokens`, `invalid_actions`, a component such as
            `spread`.
        minimum: Lowest value that is kept; null: no limit.
        maximum: Highest value that is kept; null: no limit.

    Reasons are NUMBER_below_minimum, NUMBER_above_maximum and NUMBER_unknown.
    """

    def __init__(self, number: str, minimum: FiniteFloat | None = None, maximum: FiniteFloat | None = None):
        if minimum is None and maximum is None:
            message = f"minimum and maximum are both null, so the filter drops no {number}; set at least one of them"
            raise SpecError([Problem("filter.minimum", message)])
        if minimum is not None and maximum is not None and minimum > maximum:
            message = (
                f"{minimum:g} is more than maximum={maximum:g}, so the filter keeps no {number}; "
                "expected minimum <= maximum"
            )
            raise SpecError([Problem("filter.minimum", message)])
        self.number = number
        self.minimum = -math.inf if minimum is None else minimum
        self.maximum = math.inf if maximum is None else maximum

    def survey(self, groups: Groups) -> Filter:
        """Check that some scored episode has the number, reading no further than the first one that has.

        Raises SpecError if no scored episode has it.
        """
        available: set[str] = set()
        for group in groups():
            for trajectory in group:
                if trajectory.reward is not None:
                    if number_of(trajectory, self.number) is not None:
                        return _Between(self.number, self.minimum, self.maximum)
                    available |= _names(trajectory)
        if available:
            names = ", ".join(sorted(available))
            message = f"no scored episode has a number {self.number!r}; available: {names}"
            raise SpecError([Problem("filter.number", message, nearest(self.number, sorted(available)))])
        return _Between(self.number, self.minimum, self.maximum)


class _Between:
    def __init__(self, number: str, minimum: float, maximum: float):
        self.number = number
        self.minimum = minimum
        self.maximum = maximum

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return decide_each(group, self._rule)

    def _rule(self, trajectory: Trajectory) -> str | None:
        value = number_of(trajectory, self.number)
        if value is None:
            return f"{self.number}_unknown"
        if value < self.minimum:
            return f"{self.number}_below_minimum"
        return f"{self.number}_above_maximum" if value > self.maximum else None


def number_of(trajectory: Trajectory, name: str) -> float | None:
    """Return the number with this name, or None if it is missing, NaN or not a number."""
    value: Any = trajectory.metrics.get(name, trajectory.outcome.get(name))
    if name == REWARD:
        value = trajectory.reward
    return float(value) if isinstance(value, Real) and not math.isnan(float(value)) else None


def _names(trajectory: Trajectory) -> set[str]:
    numbers = {name for name in trajectory.outcome if number_of(trajectory, name) is not None}
    return numbers | {REWARD, *trajectory.metrics}
