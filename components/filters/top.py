"""Filter that keeps the share of episodes with the highest rewards, of each group or of the whole collection."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from components.filters.protocol import ColumnFilter
from components.specs.registered import registered
from components.trajectories.reads import NOTHING

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns
    from components.trajectories.sources import Source

BELOW_TOP = "below_top_share"
"""Reason: the share is filled by episodes with a higher reward, or an equal reward and a higher precedence."""


@registered("filter.top")
class Top(ColumnFilter):
    """Filter that keeps the best share of the scored episodes, rounded up to a whole number.

    Args:
        share: Share of the scored episodes; above 0, at most 1.
        of: Scope of the share. `group`: each scenario's own episodes; ties go to the earlier episode. `collection`: all
            episodes; ties go to the lowest digest of the id, so that they are spread over all scenarios.

    Memory with `collection`: about 50 bytes per scored episode.
    """

    def __init__(
        self, share: Annotated[float, Field(gt=0, le=1)] = 0.5, of: Literal["group", "collection"] = "collection"
    ):
        self.share = share
        self.of = of
        self.per_group = of == "group"

    def prepare(self, source: Source) -> ColumnFilter:
        import numpy as np

        if self.of == "group":
            return _PerGroup(self.share)
        rewards, digests = [np.empty(0)], [np.empty(0, np.uint64)]
        for episodes in source.read(NOTHING):
            rewards.append(episodes.reward_N[episodes.scored_N])
            digests.append(_digests(episodes, episodes.scored_N))
        reward_N, digest_N = np.concatenate(rewards), np.concatenate(digests)
        if not len(reward_N):
            return _Threshold(0.0, 0)
        last = np.lexsort((digest_N, -reward_N))[_count(self.share, len(reward_N)) - 1]
        return _Threshold(float(reward_N[last]), int(digest_N[last]))


class _PerGroup(ColumnFilter):
    def __init__(self, share: float):
        self.share = share

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        import numpy as np

        from components.filters.reasons import dropped

        scored_G = np.bincount(episodes.group_N[episodes.scored_N], minlength=len(episodes.first_G))
        count_G = np.array([_count(self.share, total) for total in scored_G.tolist()])
        return dropped(episodes.rank_N() >= count_G[episodes.group_N], BELOW_TOP)


class _Threshold(ColumnFilter):
    def __init__(self, reward: float, digest: int):
        self.reward = reward
        """Reward of the last episode that is kept."""
        self.digest = digest
        """Digest of its id; of equal rewards, higher digests are dropped."""

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        from components.filters.reasons import dropped

        low_N = episodes.reward_N < self.reward
        tied_N = episodes.reward_N == self.reward
        low_N[tied_N] = _digests(episodes, tied_N) > self.digest
        return dropped(low_N, BELOW_TOP)


def _count(share: float, total: int) -> int:
    """Return share · total, rounded up. Floating-point errors do not count: 0.1 of 30 is 3."""
    return math.ceil(round(share * total, 9))


def _digests(episodes: EpisodeColumns, chosen_N: Array) -> Array:
    """Return 64-bit digests of the ids of the chosen episodes, which are the same on every machine."""
    import numpy as np

    ids = (name.encode("utf-8", "surrogatepass") for name in episodes.take(np.flatnonzero(chosen_N)).names)
    digests = b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in ids)
    return np.frombuffer(digests, ">u8").astype(np.uint64)
