"""Filter that keeps the share of episodes with the highest rewards, of each group or of the whole collection."""

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
"""Reason: the share is filled by episodes with a higher reward, or an equal reward and a higher precedence."""


@registered("filter.top")
class Top:
    """Filter that keeps the best share of the scored episodes, rounded up to a whole number.

    Args:
        share: Share of the scored episodes; above 0, at most 1.
        of: Scope of the share. `group`: each scenario's own episodes; ties go to the earlier episode. `collection`: all
            episodes; ties go to the lowest digest of the id, so that they are spread over all scenarios.

    Memory with `collection`: about 150 bytes per scored episode.
    """

    def __init__(
        self, share: Annotated[float, Field(gt=0, le=1)] = 0.5, of: Literal["group", "collection"] = "collection"
    ):
        self.share = share
        self.of = of
        self.per_group = of == "group"

    def survey(self, groups: Groups) -> Filter:
        if self.of == "group":
            return _PerGroup(self.share)
        rewards, digests = array("d"), array("Q")
        for group in groups():
            for reward, trajectory in scored(group):
                rewards.append(reward)
                digests.append(_digest(trajectory.id))
        if not rewards:
            return _Threshold((0.0, 0))
        order = sorted((-reward, digest) for reward, digest in zip(rewards, digests, strict=True))
        return _Threshold(order[_count(self.share, len(order)) - 1])


class _PerGroup:
    def __init__(self, share: float):
        self.share = share

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        count = _count(self.share, len(scored(group)))
        best_ids = {selection.trajectory_id for selection in Best(count).select(group) if selection.kept}
        return decide_each(group, lambda selection: None if selection.id in best_ids else BELOW_TOP)


class _Threshold:
    def __init__(self, last: tuple[float, int]):
        self.last = last
        """Negated reward and id digest of the last episode that is kept."""

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        def rule(trajectory: Trajectory) -> str | None:
            assert trajectory.reward is not None
            return None if (-trajectory.reward, _digest(trajectory.id)) <= self.last else BELOW_TOP

        return decide_each(group, rule)


def _count(share: float, total: int) -> int:
    """Return share · total, rounded up. Floating-point errors do not count: 0.1 of 30 is 3."""
    return math.ceil(round(share * total, 9))


def _digest(text: str) -> int:
    """Return a 64-bit digest that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
