"""Calibration of a judge: its scores compared with the truth, with 95 % intervals.

For N episodes in G groups (the episodes of a scenario), with truth t, score s of the first judgement, scores of all R
judgements, position at which each episode was shown, and length of the policy's text:

    auc               P(s_i > s_j) + P(s_i = s_j) / 2       for t_i above the threshold, t_j not
    spearman          correlation of the midranks of s and t
    spearman_within   the same within a group, mean over the groups in which t varies
    agreement         share of pairs within a group, with t_i > t_j, that have s_i > s_j; equal scores count half
    length_bias       rank correlation of s with length, given t: (r_sl - r_st r_lt) / √((1 - r_st²)(1 - r_lt²))
    position_bias     rank correlation of s with the position, both minus their mean over the episode's judgements
    noise             standard deviation of an episode's scores over the judgements (R - 1 in its denominator), mean

A constant score does not rank episodes: its correlations are 0 and its auc is 1/2. If the truth, the lengths or the
positions are constant, there is nothing to measure and the value is None. Intervals are percentile bootstraps over
groups (`components.evaluation.metrics`), because the episodes of a group are not independent. A single group has no
interval.

If the truth determines the ranks of the scores (|r_st| = 1), length_bias is 0: no variation remains to be explained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeAlias

from components.evaluation.metrics import CONFIDENCE, SEED, bootstrap
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, Any]
    Statistic: TypeAlias = Callable[..., Array]
    """Function of values (N,) and weights (B, N), the count of each value per resample, to (B,); NaN if undefined."""

RESAMPLES = 2000
BINS = 10
"""Bins of the calibration curve: deciles of the score."""
_CHUNK = 100
"""Resamples in memory at once."""


@dataclass(frozen=True)
class JudgedEpisode:
    """One episode with its truth and its judgements."""

    id: str
    group: str
    truth: float
    length: float
    """Characters in the policy's text."""
    scores: Sequence[float | None]
    """(R,) score of each judgement; None if it failed."""
    positions: Sequence[float | None] = ()
    """(R,) position within its group at each judgement, from 0 (first) to 1 (last). None if it was shown alone."""


def written(trajectory: Trajectory) -> float:
    """Return the number of characters that the policy wrote: its messages and the arguments of its tool calls."""
    messages = [
        message for history in trajectory.histories for message in history.messages if message.role == "assistant"
    ]
    return float(
        sum(len(message.content) + sum(len(call.arguments) for call in message.tool_calls) for message in messages)
    )


def measure(episodes: Sequence[JudgedEpisode], threshold: float | None = None) -> dict[str, Any]:
    """Return the measures by name, each `{"value", "low", "high", "n"}`.

    Value and interval are None if there is nothing to measure; n counts the measured items (episodes, groups, pairs).
    The result also has `{"episodes", "groups", "threshold"}`: counts of those scored at the first judgement, and the
    truth above which an episode counts as good. threshold: None takes the midpoint between the lowest and the highest
    truth.
    """
    import numpy as np

    scored = [episode for episode in episodes if episode.scores[0] is not None]
    score_N = np.array([episode.scores[0] for episode in scored], float)
    truth_N = np.array([episode.truth for episode in scored], float)
    length_N = np.array([episode.length for episode in scored], float)
    groups = [episode.group for episode in scored]
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
    """Return the midranks (B, N), from 1, of each value in a sample that contains it `weight` times."""
    import numpy as np

    distinct, place_N = np.unique(value_N, return_inverse=True)
    order_N = np.argsort(place_N, kind="stable")
    starts_U = np.searchsorted(place_N[order_N], np.arange(len(distinct)))
    count_BU = np.add.reduceat(weight_BN[:, order_N], starts_U, axis=1)
    rank_BU = np.cumsum(count_BU, axis=1) - count_BU + (count_BU + 1) / 2
    return rank_BU[:, place_N]


def auc(score_N: Array, good_N: Array, weight_BN: Array) -> Array:
    """Return the AUC (B,): (mean rank of the n⁺ good episodes - (n⁺ + 1) / 2) / n⁻ (Mann and Whitney 1947)."""
    import numpy as np

    good_BN = weight_BN * good_N
    good_B, bad_B = good_BN.sum(1), (weight_BN * ~good_N).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_B = (good_BN * ranks(score_N, weight_BN)).sum(1) / good_B
        return (mean_B - (good_B + 1) / 2) / bad_B


def spearman(score_N: Array, other_N: Array, weight_BN: Array) -> Array:
    """Return the correlation of midranks (B,): 0 if all scores are equal, NaN if all values of `other_N` are equal."""
    return _correlation(ranks(score_N, weight_BN), ranks(other_N, weight_BN), weight_BN)


def partial(score_N: Array, length_N: Array, truth_N: Array, weight_BN: Array) -> Array:
    """Return the partial rank correlation (B,) of score and length, given the truth.

    If the truth is constant, return the plain rank correlation.
    """
    import numpy as np

    s_BN, l_BN, t_BN = (ranks(values, weight_BN) for values in (score_N, length_N, truth_N))
    r_sl = _correlation(s_BN, l_BN, weight_BN)
    r_st, r_lt = (np.nan_to_num(_correlation(rank_BN, t_BN, weight_BN)) for rank_BN in (s_BN, l_BN))
    rest_s, rest_l = 1 - r_st**2, 1 - r_lt**2
    with np.errstate(invalid="ignore", divide="ignore"):
        partial_B = (r_sl - r_st * r_lt) / np.sqrt(rest_s * rest_l)
    partial_B = np.where(rest_l < 1e-12, np.nan, partial_B)
    return np.where(np.isnan(r_sl), np.nan, np.where(rest_s < 1e-12, 0.0, partial_B))


def curve(episodes: Sequence[JudgedEpisode]) -> list[dict[str, Any]]:
    """Return the mean truth by decile of the score, in ascending order, each `{"score", "value", "low", "high", "n"}`.

    Equal scores are in one decile, so there may be fewer than ten.
    """
    scored = [episode for episode in episodes if episode.scores[0] is not None]
    if not scored:
        return []
    import numpy as np

    rank_N = ranks(np.array([episode.scores[0] for episode in scored], float), np.ones((1, len(scored))))[0]
    bins: dict[int, list[JudgedEpisode]] = {}
    for episode, rank in zip(scored, rank_N, strict=True):
        bins.setdefault(min(int((rank - 0.5) / len(scored) * BINS), BINS - 1), []).append(episode)
    points = []
    for number in sorted(bins):
        truths = [[episode.truth for episode in group] for group in _members(bins[number])]
        score = fmean(episode.scores[0] or 0.0 for episode in bins[number])
        points.append({"score": score, **_clustered(truths)})
    return points


def roc(episodes: Sequence[JudgedEpisode], threshold: float) -> list[tuple[float, float]]:
    """Return (false positive rate, true positive rate) for each score as threshold, from the highest down.

    Return an empty list if there is no good or no bad episode.
    """
    labels = [(episode.scores[0], episode.truth > threshold) for episode in episodes if episode.scores[0] is not None]
    good = sum(truth for _, truth in labels)
    bad = len(labels) - good
    if not good or not bad:
        return []
    points = [(0.0, 0.0)]
    high = low = 0
    ordered = sorted(labels, key=lambda pair: -pair[0])
    for index, (score, truth) in enumerate(ordered):
        high, low = high + truth, low + (not truth)
        if index + 1 == len(ordered) or ordered[index + 1][0] != score:
            points.append((low / bad, high / good))
    return points


def _correlation(x_BN: Array, y_BN: Array, weight_BN: Array) -> Array:
    """Return the weighted Pearson correlation (B,): 0 if x is constant, NaN if y is constant."""
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
    """Return the statistic and its percentile interval over resamples of whole groups.

    Resamples in which the statistic is undefined are left out. There is no interval if they are half or more.
    """
    import numpy as np

    count = len(groups)
    summary: dict[str, Any] = {"value": None, "low": None, "high": None, "n": count}
    if count < 2:
        return summary
    value = float(statistic(*values_N, np.ones((1, count)))[0])
    if math.isnan(value):
        return summary
    names = sorted(set(groups))
    index_N = np.searchsorted(names, groups)
    generator = np.random.default_rng(SEED)
    chunks = []
    for _ in range(0, RESAMPLES, _CHUNK) if len(names) > 1 else ():
        times_BG = generator.multinomial(len(names), [1 / len(names)] * len(names), size=_CHUNK)
        chunks.append(statistic(*values_N, times_BG[:, index_N].astype(float)))
    statistic_B = np.concatenate(chunks) if chunks else np.array([])
    defined = statistic_B[~np.isnan(statistic_B)]
    if 2 * len(defined) <= RESAMPLES:
        return {**summary, "value": value}
    low, high = np.quantile(defined, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return {**summary, "value": value, "low": float(low), "high": float(high)}


def _clustered(clusters: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the mean over all values and its interval."""
    values = [value for cluster in clusters for value in cluster]
    if not values:
        return {"value": None, "low": None, "high": None, "n": 0}
    low, high = bootstrap(clusters)
    return {"value": fmean(values), "low": low, "high": high, "n": len(values)}


def _members(episodes: Sequence[JudgedEpisode]) -> list[list[JudgedEpisode]]:
    groups: dict[str, list[JudgedEpisode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    return list(groups.values())


def _within(scored: Sequence[JudgedEpisode]) -> list[float | None]:
    """Return Spearman's correlation within each group; None if the truth is constant."""
    import numpy as np

    correlations: list[float | None] = []
    for group in _members(scored):
        score_M, truth_M = (
            np.array(values, float) for values in zip(*((g.scores[0], g.truth) for g in group), strict=True)
        )
        value = float(spearman(score_M, truth_M, np.ones((1, len(group))))[0])
        correlations.append(None if math.isnan(value) else value)
    return correlations


def _pairs(scored: Sequence[JudgedEpisode]) -> list[list[float]]:
    """Return, by group, for each pair whose truth differs: 1 if the scores order it alike, 1/2 if equal, else 0."""
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


def _deviations(episodes: Sequence[JudgedEpisode]) -> list[list[float]]:
    """Return, by group, the standard deviation of each episode that was scored at least twice."""
    return [
        [stdev(values) for episode in group if len(values := [s for s in episode.scores if s is not None]) > 1]
        for group in _members(episodes)
    ]


def _position_bias(episodes: Sequence[JudgedEpisode]) -> dict[str, Any]:
    """Return the position bias over all judgements of the episodes that were shown at several positions."""
    import numpy as np

    groups: list[str] = []
    scores: list[float] = []
    positions: list[float] = []
    for episode in episodes:
        pairs = zip(episode.scores, episode.positions, strict=False)
        judgements = [(score, position) for score, position in pairs if score is not None and position is not None]
        if len({position for _, position in judgements}) > 1:
            mean_score = fmean(score for score, _ in judgements)
            mean_position = fmean(position for _, position in judgements)
            groups += [episode.group] * len(judgements)
            scores += [_rounded(score - mean_score) for score, _ in judgements]
            positions += [_rounded(position - mean_position) for _, position in judgements]
    return _resampled(spearman, groups, np.array(scores), np.array(positions))


def _rounded(value: float) -> float:
    """Round a difference to the mean, so that equal values have equal ranks despite floating-point errors."""
    return round(value, 12)


LEAST = ("auc", "spearman", "spearman_within", "agreement")
"""Measures whose mark is a minimum."""


@dataclass(frozen=True)
class Mark:
    """Requirement on one measure of a judge, with the measured value."""

    measure: str
    value: float
    measured: float | None
    least: bool
    """True: the mark is a minimum. False: a maximum of the absolute value."""

    @property
    def met(self) -> bool:
        """True if the requirement is met; False if the measured value is unknown."""
        if self.measured is None:
            return False
        return self.measured >= self.value if self.least else abs(self.measured) <= self.value

    def __str__(self) -> str:
        """Return the reason why the requirement is not met."""
        if self.measured is None:
            return f"{self.measure} is not known, and its mark is {self.value:g}"
        return f"{self.measure} is {self.measured:.3f}, {'below' if self.least else 'above'} its mark of {self.value:g}"


def judge_by(marks: Mapping[str, float], values: Mapping[str, float | None]) -> list[Mark]:
    """Return the marks with the measured value of each."""
    return [Mark(name, mark, values.get(name), name in LEAST) for name, mark in marks.items()]
