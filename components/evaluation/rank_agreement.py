"""Agreement of two rewards on the episodes of groups: rank correlation, and advantages that change sign or order.

An advantage is here the reward minus the mean of its group. A scale or a shift of a reward changes none of these
figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from components.trajectories.groups import RELATIVE_TOLERANCE, have_spread


def centred(rewards: Sequence[float]) -> list[float]:
    """Return the rewards minus their mean; zeros if they do not differ beyond rounding."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards] if have_spread(rewards) else [0.0] * len(rewards)


@dataclass(frozen=True)
class FlippedGroup:
    """Group in which two rewards teach opposite things."""

    group: str
    first: Mapping[str, float]
    """Advantages under the first reward by episode."""
    second: Mapping[str, float]
    signs: Sequence[str]
    """Episodes with a positive advantage under one reward and a negative one under the other."""
    swapped: Sequence[tuple[str, str]]
    """Pairs of episodes in strictly opposite order."""

    @property
    def episodes(self) -> list[str]:
        """Episodes to read: those whose sign changes, else the members of swapped pairs; the largest change first."""
        chosen = self.signs or list(dict.fromkeys(name for pair in self.swapped for name in pair))
        sizes = [max(map(abs, side.values())) for side in (self.first, self.second)]
        return sorted(chosen, key=lambda name: (-abs(self.first[name] / sizes[0] - self.second[name] / sizes[1]), name))


@dataclass(frozen=True)
class RankAgreement:
    """Agreement of two rewards over groups."""

    tau: float | None
    """Mean of Kendall's tau-b, which corrects for ties (Kendall 1945, Biometrika 33:239), over the groups in which both
    rewards differ between episodes; None without one."""
    ranked: int
    """Number of these groups."""
    groups: int
    """Number of groups with two episodes that both rewards scored."""
    flips: Sequence[FlippedGroup]

    @property
    def flipped(self) -> float | None:
        """Share of groups in which an advantage changes sign, or two episodes change order; None without a group."""
        return len(self.flips) / self.groups if self.groups else None


Rewards = Mapping[str, Mapping[str, float]]
"""Rewards by group and episode; episodes without a score are left out."""


def rank_agreement(first: Rewards, second: Rewards) -> RankAgreement:
    """Return the agreement of two rewards on the episodes that both scored."""
    from scipy.stats import kendalltau

    taus, flips, groups = [], [], 0
    for group in first:
        names = [name for name in first[group] if name in second.get(group, {})]
        if len(names) < 2:
            continue
        groups += 1
        left, right = ([side[group][name] for name in names] for side in (first, second))
        if have_spread(left) and have_spread(right):
            taus.append(round(float(kendalltau(left, right).statistic), 12))  # scipy's 1 may be 1 - 1e-16
            flips += _flips(group, names, left, right)
    return RankAgreement(fmean(taus) if taus else None, len(taus), groups, flips)


def _flips(group: str, names: Sequence[str], left: Sequence[float], right: Sequence[float]) -> list[FlippedGroup]:
    """Return the group if an advantage changes sign or two episodes change order."""
    first, second = centred(left), centred(right)
    limits = [max(map(abs, side)) * RELATIVE_TOLERANCE for side in (left, right)]
    signs = [
        name
        for name, a, b in zip(names, first, second, strict=True)
        if min(abs(a) - limits[0], abs(b) - limits[1]) > 0 and a * b < 0
    ]
    swapped = [
        (names[i], names[j])
        for i, j in combinations(range(len(names)), 2)
        if _sign(left[j] - left[i]) * _sign(right[j] - right[i]) < 0
    ]
    by_episode = [dict(zip(names, side, strict=True)) for side in (first, second)]
    return [FlippedGroup(group, by_episode[0], by_episode[1], signs, swapped)] if signs or swapped else []


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
