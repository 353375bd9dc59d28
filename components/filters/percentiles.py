"""Keeps episodes whose reward lies between two percentiles: of their group, or of the whole collection."""

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
    """Keeps rewards from one percentile to another, both included; equal rewards share their fate.

    Args:
        lowest: Percentile of the lowest reward that is kept: 0 is the minimum, 50 the median.
        highest: That of the highest; 100 is the maximum.
        of: Over the scored episodes of a `group`, or of the whole `collection`.

    A percentile between two rewards is interpolated linearly (method 7 of Hyndman and Fan, 1996; numpy's default).
    In memory: of `collection` about 50 bytes for each scored episode.
    """

    def __init__(
        self,
        lowest: Annotated[float, Field(ge=0, le=100)] = 50.0,
        highest: Annotated[float, Field(ge=0, le=100)] = 100.0,
        of: Literal["group", "collection"] = "collection",
    ):
        if lowest > highest:
            message = f"{lowest:g} is more than highest={highest:g}; expected at most that"
            raise SpecError([Problem("filter.lowest", message)])
        self.lowest = lowest
        self.highest = highest
        self.of = of

    def survey(self, groups: Groups) -> Filter:
        if self.of == "group":
            return _OfGroup(self.lowest, self.highest)
        rewards = sorted(array("d", (reward for group in groups() for reward, _ in scored(group))))
        if not rewards:
            return _Within(-math.inf, math.inf)
        return _Within(percentile(rewards, self.lowest), percentile(rewards, self.highest))


class _OfGroup:
    def __init__(self, lowest: float, highest: float):
        self.lowest = lowest
        self.highest = highest

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        if not (rewards := sorted(reward for reward, _ in scored(group))):
            return decide_each(group, lambda one: None)
        bounds = percentile(rewards, self.lowest), percentile(rewards, self.highest)
        return _Within(*bounds).select(group)


class _Within:
    def __init__(self, lowest: float, highest: float):
        self.lowest = lowest
        self.highest = highest

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        def rule(one: Trajectory) -> str | None:
            assert one.reward is not None
            return BELOW if one.reward < self.lowest else ABOVE if one.reward > self.highest else None

        return decide_each(group, rule)


def percentile(ordered: Sequence[float], which: float) -> float:
    """Of numbers in rising order, at least one; which: 0 to 100."""
    place = which * (len(ordered) - 1) / 100
    below = int(place)
    rest = place - below
    if not rest or ordered[below] == ordered[below + 1]:
        return ordered[below]
    return ordered[below] * (1 - rest) + ordered[below + 1] * rest
