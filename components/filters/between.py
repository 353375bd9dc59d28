"""Keeps episodes of which a number is neither too low nor too high: reward, turns, tokens, spread of judges.

A number is the reward, a metric of the episode, a component of its score, or what the environment said of its outcome:
the first that has the name.
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
    """Drops episodes whose number is below a minimum or above a maximum, and those that have no such number.

    Args:
        number: Its name: `reward`, `turns`, `sampled_tokens`, `invalid_actions`, a component such as `spread`.
        minimum: Lowest that is kept; null is no limit.
        maximum: Highest that is kept; null is no limit.

    Reasons are NUMBER_below_minimum, NUMBER_above_maximum and NUMBER_unknown.
    """

    def __init__(self, number: str, minimum: FiniteFloat | None = None, maximum: FiniteFloat | None = None):
        if minimum is None and maximum is None:
            raise SpecError([Problem("filter.minimum", f"null, as maximum: no {number} is dropped; expected a number")])
        if minimum is not None and maximum is not None and minimum > maximum:
            message = f"{minimum:g} is more than maximum={maximum:g}: no {number} is kept; expected at most that"
            raise SpecError([Problem("filter.minimum", message)])
        self.number = number
        self.minimum = -math.inf if minimum is None else minimum
        self.maximum = math.inf if maximum is None else maximum

    def survey(self, groups: Groups) -> Filter:
        """Looks for the number, no further than where it is found. Raises SpecError where no scored episode has it."""
        others: set[str] = set()
        for group in groups():
            for one in group:
                if one.reward is not None:
                    if number_of(one, self.number) is not None:
                        return _Between(self.number, self.minimum, self.maximum)
                    others |= _names(one)
        if others:
            known = ", ".join(sorted(others))
            message = f"{self.number!r} is no number of any scored episode; there are {known}"
            raise SpecError([Problem("filter.number", message, nearest(self.number, sorted(others)))])
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
    """The number of that name; None where there is none, or one that is not a number."""
    value: Any = trajectory.metrics.get(name, trajectory.outcome.get(name))
    if name == REWARD:
        value = trajectory.reward
    return float(value) if isinstance(value, Real) and not math.isnan(float(value)) else None


def _names(trajectory: Trajectory) -> set[str]:
    numbers = {name for name in trajectory.outcome if number_of(trajectory, name) is not None}
    return numbers | {REWARD, *trajectory.metrics}
