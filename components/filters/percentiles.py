"""Filter that keeps episodes whose reward lies between two percentiles of their group or of the collection."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from components.errors import Problem, SpecError
from components.filters.decisions import decide_each, scored
from components.filters.protocol import Filter, Groups
from components.specs.registered import registered
from components.trajectories.schema import Selection, Trajectory

BELOW, ABOVE = "below_percentile", "above_percentile"


@registered("filter.percentiles")
class Percentiles:
    """Filter that keeps rewards between two percentiles, both included. Equal rewards get the same decision.

    Args:
        lowest: Percentile of the lowest reward that is kept: 0 is the minimum, 50 the median.
        highest: Percentile of the highest reward that is kept: 100 is the maximum.
        of: Scope of the percentiles: the scored episodes of each `group`, or of the whole `collection`.

    A percentile between two rewards is interpolated linearly (method 7 of Hyndman and Fan, 1996; numpy's default).
    Memory with `collection`: about 50 bytes per scored episode.
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

    def survey(self, groups: Groups) -> Filter:
        if self.of == "group":
            return _PerGroup(self.lowest, self.highest)
        rewards = sorted(array("d", (reward for group in groups() for reward, _ in scored(group))))
        if not rewards:
            return _Within(-math.inf, math.inf)
        return _Within(percentile(rewards, self.lowest), percentile(rewards, self.highest))


class _PerGroup:
    def __init__(self, lowest: float, highest: float):
        self.lowest = lowest
        self.highest = highest

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        if not (rewards := sorted(reward for reward, _ in scored(group))):
            return decide_each(group, lambda trajectory: None)
        bounds = percentile(rewards, self.lowest), percentile(rewards, self.highest)
        return _Within(*bounds).select(group)


class _Within:
    def __init__(self, lowest: float, highest: float):
        self.lowest = lowest
        self.highest = highest

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        def rule(trajectory: Trajectory) -> str | None:
            assert trajectory.reward is not None
            return BELOW if trajectory.reward < self.lowest else ABOVE if trajectory.reward > self.highest else None

        return decide_each(group, rule)


def percentile(ordered: Sequence[float], which: float) -> float:
    """Return the percentile `which` (0 to 100) of a non-empty sequence in ascending order."""
    position = which * (len(ordered) - 1) / 100
    below = int(position)
    fraction = position - below
    if not fraction or ordered[below] == ordered[below + 1]:
        return ordered[below]
    return ordered[below] * (1 - fraction) + ordered[below + 1] * fraction
