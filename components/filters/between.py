"""Filter by bounds on one number of an episode: reward, turns, tokens, spread of judges.

The number is looked up by name: the reward, a metric of the episode (score components included), then a field of the
environment's outcome. The first match is used.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import FiniteFloat

from components.errors import Problem, SpecError
from components.filters.protocol import ColumnFilter
from components.specs.base import nearest
from components.specs.registered import registered
from components.trajectories.reads import NOTHING, NUMBERS

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns
    from components.trajectories.sources import Source

REWARD = "reward"


@registered("filter.between")
class Between(ColumnFilter):
    """Filter that drops episodes whose number is below a minimum, above a maximum, or missing.

    Args:
        number: Name of the number: `reward`, `turns`, `sampled_tokens`, `invalid_actions`, a component such as
            `spread`.
        minimum: Lowest value that is kept; null: no limit.
        maximum: Highest value that is kept; null: no limit.

    Reasons are NUMBER_below_minimum, NUMBER_above_maximum and NUMBER_unknown.
    """

    per_group = False
    """The number must occur in the whole collection, not in each part of it."""

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
        self.reads = NOTHING if number == REWARD else NUMBERS

    def prepare(self, source: Source) -> ColumnFilter:
        """Check that some scored episode has the number, reading no further than the first batch that has one.

        Raises SpecError if no scored episode has it.
        """
        available: set[str] = set()
        for episodes in source.read(NUMBERS):
            if not _isnan(self._number_N(episodes)[episodes.scored_N]).all():
                return self
            if episodes.scored_N.any():
                available |= episodes.number_names() | {REWARD}
        if available:
            names = ", ".join(sorted(available))
            message = f"no scored episode has a number {self.number!r}; available: {names}"
            raise SpecError([Problem("filter.number", message, nearest(self.number, sorted(available)))])
        return self

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        from components.filters.reasons import dropped

        value_N = self._number_N(episodes)
        reasons_N = dropped(_isnan(value_N), f"{self.number}_unknown")
        reasons_N[value_N < self.minimum] = f"{self.number}_below_minimum"
        reasons_N[value_N > self.maximum] = f"{self.number}_above_maximum"
        return reasons_N

    def _number_N(self, episodes: EpisodeColumns) -> Array:
        return episodes.reward_N if self.number == REWARD else episodes.number_N(self.number)


def _isnan(value_N: Array) -> Array:
    return value_N != value_N
