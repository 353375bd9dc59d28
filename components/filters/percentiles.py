"""Filter that keeps episodes whose reward lies between two percentiles of their group or of the collection."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from components.errors import Problem, SpecError
from components.filters.protocol import ColumnFilter
from components.specs.registered import registered
from components.trajectories.reads import NOTHING

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns
    from components.trajectories.sources import Source

BELOW, ABOVE = "below_percentile", "above_percentile"


@registered("filter.percentiles")
class Percentiles(ColumnFilter):
    """Filter that keeps rewards between two percentiles, both included. Equal rewards get the same decision.

    Args:
        lowest: Percentile of the lowest reward that is kept: 0 is the minimum, 50 the median.
        highest: Percentile of the highest reward that is kept: 100 is the maximum.
        of: Scope of the percentiles: the scored episodes of each `group`, or of the whole `collection`.

    A percentile between two rewards is interpolated linearly (method 7 of Hyndman and Fan, 1996; numpy's default).
    Memory with `collection`: about 16 bytes per scored episode.
    """

    def __init__(
        self,
        lowest: Annotated[float, Field(ge=0, le=100)] = 50.0,
        highest: Annotated[float, Field(ge=0, le=100)] = 100.0,
        of: Literal["group", "collection"] = "collection",
    ):
        if lowest > highest:
            message = f"{lowest:g} is more than highest={highest:g}; expected lowest <= highest"
            raise SpecError([Problem("filter.lowest", message)])
        self.lowest = lowest
        self.highest = highest
        self.of = of
        self.per_group = of == "group"

    def prepare(self, source: Source) -> ColumnFilter:
        import numpy as np

        if self.of == "group":
            return _PerGroup(self.lowest, self.highest)
        rewards = [episodes.reward_N[episodes.scored_N] for episodes in source.read(NOTHING)]
        ordered = np.sort(np.concatenate([np.empty(0), *rewards]))
        if not len(ordered):
            return _Within(-math.inf, math.inf)
        bounds = (percentiles(ordered, np.array([len(ordered)]), which) for which in (self.lowest, self.highest))
        return _Within(*(float(bound_G[0]) for bound_G in bounds))


class _PerGroup(ColumnFilter):
    def __init__(self, lowest: float, highest: float):
        self.lowest = lowest
        self.highest = highest

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        ordered = episodes.ordered_rewards()
        low_G, high_G = (percentiles(*ordered, which) for which in (self.lowest, self.highest))
        return _outside_N(episodes, low_G[episodes.group_N], high_G[episodes.group_N])


class _Within(ColumnFilter):
    def __init__(self, lowest: float, highest: float):
        self.lowest = lowest
        self.highest = highest

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        return _outside_N(episodes, self.lowest, self.highest)


def _outside_N(episodes: EpisodeColumns, lowest: Array | float, highest: Array | float) -> Array:
    from components.filters.reasons import dropped

    reasons_N = dropped(episodes.reward_N > highest, ABOVE)
    reasons_N[episodes.reward_N < lowest] = BELOW
    return reasons_N


def percentiles(ordered: Array, size_G: Array, which: float) -> Array:
    """Return the (G,) percentile `which` (0 to 100) of each group; NaN for an empty group.

    ordered: values of all groups, ascending within each. size_G: number of values of each group."""
    import numpy as np

    percentile_G = np.full(len(size_G), np.nan)
    filled_G = size_G > 0
    size = size_G[filled_G]
    first = np.cumsum(size) - size
    position = which * (size - 1) / 100
    below = position.astype(np.int64)
    fraction = position - below
    low, high = ordered[first + below], ordered[first + np.minimum(below + 1, size - 1)]
    exact = (fraction == 0) | (low == high)
    with np.errstate(invalid="ignore"):  # infinite values, where a single one is exact
        percentile_G[filled_G] = np.where(exact, low, low * (1 - fraction) + high * fraction)
    return percentile_G
