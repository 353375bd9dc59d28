"""How far a judge can be trusted: its scores against the truth, with 95 % intervals.

Of N episodes in G groups (the episodes of a scenario), with the truth t, the score s of the first judgement, the scores
of all R judgements, the place at which each was shown and the length of what the policy wrote:

    auc               P(s_i > s_j) + P(s_i = s_j) / 2       for t_i above the threshold, t_j not
    spearman          correlation of the midranks of s and t
    spearman_within   the same within a group, mean over the groups in which t differs
    agreement         share of pairs within a group, with t_i > t_j, that have s_i > s_j; equal scores count half
    length_bias       rank correlation of s with length, given t: (r_sl - r_st r_lt) / √((1 - r_st²)(1 - r_lt²))
    position_bias     rank correlation of s with the place shown, each less its mean over the judgements of the episode
    noise             standard deviation of an episode's scores over the judgements (R - 1 in its denominator), mean

A score that never differs orders nothing: its correlations are 0 and its auc is 1/2. Where the truth never differs, or
lengths, or places, there is nothing to measure and the value is None. Intervals are percentile bootstraps over groups
(`components.evaluation.metrics`), for a group's episodes are not independent of each other; a single group has none.

Where the truth decides the ranks of the scores altogether (|r_st| = 1), nothing is left for length to explain: 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeAlias

from components.evaluation.metrics import CONFIDENCE, SEED, bootstrap
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, Any]
    Statistic: TypeAlias = Callable[..., Array]
    """From values (N,) and weights (B, N), how often each is in a resample, to (B,); NaN where it is not defined."""

RESAMPLES = 2000
BINS = 10
"""Of the calibration curve: deciles of the score."""
_PART = 100
"""Resamples that are in memory at once."""


@dataclass(frozen=True)
class Judged:
    """One episode, and what was said of it."""

    id: str
    group: str
    truth: float
    length: float
    """Characters that the policy wrote."""
    scores: Sequence[float | None]
    """(R,) of each judgement; None where it could not be scored."""
    positions: Sequence[float | None] = ()
    """(R,) at which place of its group it was shown each time, from 0 (the first) to 1 (the last). None where it was
    shown alone."""


def written(trajectory: Trajectory) -> float:
    """Characters that the policy wrote in an episode: its messages and the arguments of its calls."""
    messages = [one for history in trajectory.histories for one in history.messages if one.role == "assistant"]
    return float(sum(len(one.content) + sum(len(call.arguments) for call in one.tool_calls) for one in messages))


def measure(episodes: Sequence[Judged], threshold: float | None = None) -> dict[str, Any]:
    """The measures by name, each `{"value", "low", "high", "n"}`: value and interval are None where there is nothing to
    measure, n is what was measured (episodes; groups; pairs).

    Besides them `{"episodes", "groups", "threshold"}`: what was scored at the first judgement, and the truth above
    which an episode counts as good. threshold: None takes the middle between the lowest and the highest truth.
    """
    import numpy as np

    scored = [one for one in episodes if one.scores[0] is not None]
    score_N = np.array([one.scores[0] for one in scored], float)
    truth_N = np.array([one.truth for one in scored], float)
    length_N = np.array([one.length for one in scored], float)
    groups = [one.group for one in scored]
    if threshold is None:
        threshold = float(truth_N.min() + truth_N.max()) / 2 if len(scored) else 0.0
    return {
        "episodes": len(scored),
        "groups": len(set(groups)),
        "threshold": threshold,
        "auc": _resampled(auc, groups, score_N, truth_N > threshold),
        "spearman": _resampled(spearman, groups, score_N, truth_N),
        "spearman_within": _clustered([[r] for r in _within(scored) if r is not None]),
        "agreement": _clustered([pairs for pairs in _pairs(scored) if pairs]),
        "length_bias": _resampled(partial, groups, score_N, length_N, truth_N),
        "position_bias": _position_bias(episodes),
        "noise": _clustered([deviations for deviations in _deviations(episodes) if deviations]),
    }


def ranks(value_N: Array, weight_BN: Array) -> Array:
    """(B, N) midranks, from 1, of each value in a sample that has it `weight` times."""
    import numpy as np

    distinct, place_N = np.unique(value_N, return_inverse=True)
    order_N = np.argsort(place_N, kind="stable")
    starts_U = np.searchsorted(place_N[order_N], np.arange(len(distinct)))
    count_BU = np.add.reduceat(weight_BN[:, order_N], starts_U, axis=1)
    rank_BU = np.cumsum(count_BU, axis=1) - count_BU + (count_BU + 1) / 2
    return rank_BU[:, place_N]


def auc(score_N: Array, good_N: Array, weight_BN: Array) -> Array:
    """(B,) by the ranks of the good: (mean rank of n⁺ good ones - (n⁺ + 1) / 2) / n⁻ (Mann and Whitney 1947)."""
    import numpy as np

    good_BN = weight_BN * good_N
    good_B, bad_B = good_BN.sum(1), (weight_BN * ~good_N).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_B = (good_BN * ranks(score_N, weight_BN)).sum(1) / good_B
        return (mean_B - (good_B + 1) / 2) / bad_B


def spearman(score_N: Array, other_N: Array, weight_BN: Array) -> Array:
    """(B,) correlation of midranks. 0 where all scores are equal, NaN where all others are."""
    return _correlation(ranks(score_N, weight_BN), ranks(other_N, weight_BN), weight_BN)


def partial(score_N: Array, length_N: Array, truth_N: Array, weight_BN: Array) -> Array:
    """(B,) rank correlation of score and length, given the truth. Where the truth never differs, without it."""
    import numpy as np

    s_BN, l_BN, t_BN = (ranks(values, weight_BN) for values in (score_N, length_N, truth_N))
    r_sl = _correlation(s_BN, l_BN, weight_BN)
    r_st, r_lt = (np.nan_to_num(_correlation(one, t_BN, weight_BN)) for one in (s_BN, l_BN))
    left_s, left_l = 1 - r_st**2, 1 - r_lt**2
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (r_sl - r_st * r_lt) / np.sqrt(left_s * left_l)
    found = np.where(left_l < 1e-12, np.nan, found)
    return np.where(np.isnan(r_sl), np.nan, np.where(left_s < 1e-12, 0.0, found))


def curve(episodes: Sequence[Judged]) -> list[dict[str, Any]]:
    """The mean truth by decile of the score, from the lowest: `{"score", "value", "low", "high", "n"}` each. Equal
    scores are in one decile, so there may be fewer."""
    scored = [one for one in episodes if one.scores[0] is not None]
    if not scored:
        return []
    import numpy as np

    rank_N = ranks(np.array([one.scores[0] for one in scored], float), np.ones((1, len(scored))))[0]
    bins: dict[int, list[Judged]] = {}
    for one, rank in zip(scored, rank_N, strict=True):
        bins.setdefault(min(int((rank - 0.5) / len(scored) * BINS), BINS - 1), []).append(one)
    found = []
    for number in sorted(bins):
        truths = [[one.truth for one in group] for group in _members(bins[number])]
        score = fmean(one.scores[0] or 0.0 for one in bins[number])
        found.append({"score": score, **_clustered(truths)})
    return found


def roc(episodes: Sequence[Judged], threshold: float) -> list[tuple[float, float]]:
    """(share of the bad, share of the good) that score at least as high, for each score from the highest down; empty
    where there are none of either."""
    found = [(one.scores[0], one.truth > threshold) for one in episodes if one.scores[0] is not None]
    good = sum(truth for _, truth in found)
    bad = len(found) - good
    if not good or not bad:
        return []
    points = [(0.0, 0.0)]
    high = low = 0
    ordered = sorted(found, key=lambda pair: -pair[0])
    for place, (score, truth) in enumerate(ordered):
        high, low = high + truth, low + (not truth)
        if place + 1 == len(ordered) or ordered[place + 1][0] != score:
            points.append((low / bad, high / good))
    return points


def _correlation(x_BN: Array, y_BN: Array, weight_BN: Array) -> Array:
    """(B,) Pearson's, weighted. 0 where x does not vary, NaN where y does not."""
    import numpy as np

    total_B = weight_BN.sum(1, keepdims=True)
    x_BN = x_BN - (weight_BN * x_BN).sum(1, keepdims=True) / total_B
    y_BN = y_BN - (weight_BN * y_BN).sum(1, keepdims=True) / total_B
    xx_B, yy_B = (weight_BN * x_BN**2).sum(1), (weight_BN * y_BN**2).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        r_B = (weight_BN * x_BN * y_BN).sum(1) / np.sqrt(xx_B * yy_B)
    small = 1e-9 * total_B[:, 0]
    return np.where(yy_B <= small, np.nan, np.where(xx_B <= small, 0.0, r_B))


def _resampled(statistic: Statistic, groups: Sequence[str], *values_N: Array) -> dict[str, Any]:
    """The statistic, and its percentile interval over resamples of whole groups. A resample in which it is not defined
    is left out; no interval where that is the half of them."""
    import numpy as np

    count = len(groups)
    found: dict[str, Any] = {"value": None, "low": None, "high": None, "n": count}
    if count < 2:
        return found
    value = float(statistic(*values_N, np.ones((1, count)))[0])
    if math.isnan(value):
        return found
    names = sorted(set(groups))
    index_N = np.searchsorted(names, groups)
    generator = np.random.default_rng(SEED)
    drawn = []
    for _ in range(0, RESAMPLES, _PART) if len(names) > 1 else ():
        times_BG = generator.multinomial(len(names), [1 / len(names)] * len(names), size=_PART)
        drawn.append(statistic(*values_N, times_BG[:, index_N].astype(float)))
    statistic_B = np.concatenate(drawn) if drawn else np.array([])
    defined = statistic_B[~np.isnan(statistic_B)]
    if 2 * len(defined) <= RESAMPLES:
        return {**found, "value": value}
    low, high = np.quantile(defined, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return {**found, "value": value, "low": float(low), "high": float(high)}


def _clustered(clusters: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The mean over all values, and its interval."""
    values = [value for cluster in clusters for value in cluster]
    if not values:
        return {"value": None, "low": None, "high": None, "n": 0}
    low, high = bootstrap(clusters)
    return {"value": fmean(values), "low": low, "high": high, "n": len(values)}


def _members(episodes: Sequence[Judged]) -> list[list[Judged]]:
    groups: dict[str, list[Judged]] = {}
    for one in episodes:
        groups.setdefault(one.group, []).append(one)
    return list(groups.values())


def _within(scored: Sequence[Judged]) -> list[float | None]:
    """Spearman's correlation within each group; None where the truth does not differ."""
    import numpy as np

    found: list[float | None] = []
    for group in _members(scored):
        score_M, truth_M = (
            np.array(values, float) for values in zip(*((g.scores[0], g.truth) for g in group), strict=True)
        )
        value = float(spearman(score_M, truth_M, np.ones((1, len(group))))[0])
        found.append(None if math.isnan(value) else value)
    return found


def _pairs(scored: Sequence[Judged]) -> list[list[float]]:
    """Of each group, for each pair whose truth differs: 1 where the scores order it so, 1/2 where they are equal."""
    return [
        [
            _ordered(better.scores[0] or 0.0, worse.scores[0] or 0.0)
            for better in group
            for worse in group
            if better.truth > worse.truth
        ]
        for group in _members(scored)
    ]


def _ordered(better: float, worse: float) -> float:
    return 1.0 if better > worse else 0.5 if better == worse else 0.0


def _deviations(episodes: Sequence[Judged]) -> list[list[float]]:
    """Of each group, the standard deviation of each episode that was scored at least twice."""
    return [
        [stdev(values) for one in group if len(values := [s for s in one.scores if s is not None]) > 1]
        for group in _members(episodes)
    ]


def _position_bias(episodes: Sequence[Judged]) -> dict[str, Any]:
    """Of every judgement of every episode that was shown at several places."""
    import numpy as np

    groups: list[str] = []
    scores: list[float] = []
    places: list[float] = []
    for one in episodes:
        pairs = zip(one.scores, one.positions, strict=False)
        shown = [(score, place) for score, place in pairs if score is not None and place is not None]
        if len({place for _, place in shown}) > 1:
            mean_score, mean_place = fmean(score for score, _ in shown), fmean(place for _, place in shown)
            groups += [one.group] * len(shown)
            scores += [_rounded(score - mean_score) for score, _ in shown]
            places += [_rounded(place - mean_place) for _, place in shown]
    return _resampled(spearman, groups, np.array(scores), np.array(places))


def _rounded(value: float) -> float:
    """A difference to a mean without what rounding made of equal numbers."""
    return round(value, 12)
