"""Keeps a share of the episodes, those with the highest rewards: of each group, or of the whole collection."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from components.filters.best import Best
from components.filters.decisions import decide_each, scored
from components.filters.protocol import Filter, Groups
from components.specs.registered import registered
from components.trajectories.schema import Selection, Trajectory

BELOW_TOP = "below_top_share"
"""Reason: enough episodes have a higher reward, or the same and come before it."""


@registered("filter.top")
class Top:
    """Keeps the best share of the scored episodes, rounded up to a whole number.

    Args:
        share: Of the scored episodes; above 0, at most 1.
        of: `group`: of each scenario's own episodes, of equal ones the first. `collection`: of all, of equal ones those
            whose id has the lowest digest, so that equals come from all scenarios and not from the first.

    In memory: of `collection` about 150 bytes for each scored episode.
    """

    def __init__(
        self, share: Annotated[float, Field(gt=0, le=1)] = 0.5, of: Literal["group", "collection"] = "collection"
    ):
        self.share = share
        self.of = of

    def survey(self, groups: Groups) -> Filter:
        if self.of == "group":
            return _OfGroup(self.share)
        rewards, digests = array("d"), array("Q")
        for group in groups():
            for reward, one in scored(group):
                rewards.append(reward)
                digests.append(_digest(one.id))
        if not rewards:
            return _OfCollection((0.0, 0))
        order = sorted((-reward, digest) for reward, digest in zip(rewards, digests, strict=True))
        return _OfCollection(order[_count(self.share, len(order)) - 1])


class _OfGroup:
    def __init__(self, share: float):
        self.share = share

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        count = _count(self.share, len(scored(group)))
        kept = {one.trajectory_id for one in Best(count).select(group) if one.kept}
        return decide_each(group, lambda one: None if one.id in kept else BELOW_TOP)


class _OfCollection:
    def __init__(self, last: tuple[float, int]):
        self.last = last
        """Reward, its sign turned, and digest of the last one that is kept."""

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        def rule(one: Trajectory) -> str | None:
            assert one.reward is not None
            return None if (-one.reward, _digest(one.id)) <= self.last else BELOW_TOP

        return decide_each(group, rule)


def _count(share: float, of: int) -> int:
    """Rounded up; 0.1 of 30 are 3, though 0.1 · 30 is a little more in floating point."""
    return math.ceil(round(share * of, 9))


def _digest(text: str) -> int:
    """64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
