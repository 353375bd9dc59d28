"""Metrics of a set of episodes, and of the difference between two sets, with 95 % intervals.

All results are JSON data: plain numbers, and None if there is nothing to measure. Failed episodes are counted
separately and excluded from all means, because they say nothing about the policy. Truncated episodes are unsuccessful
and count in all means (`components.trajectories.truncation`). Unscored episodes are excluded from the mean reward.

Episodes are read as columns (`components.trajectories.columns`): whole trajectories are not needed.

- Success, one policy: Wilson's score interval (Wilson 1927, JASA 22:209) for one episode per scenario. Episodes of the
  same scenario are not independent, so with several of them the bootstrap over scenarios is used.
- Means of rewards, turns, pass@k and pass^k: percentile bootstrap over scenarios (Efron and Tibshirani 1993, chapter
  13), with all episodes of a sampled scenario, 10,000 resamples, fixed seed. No interval for fewer than two scenarios.
- Evaluations that may stop early (`evaluate.stop=decided`): confidence sequences for success, of one policy and of two
  (`components.evaluation.sequential`). Means of other measures have no interval there: they are not bounded.
- Success, two policies on the same scenarios: Newcombe's square-and-add method for paired proportions, with continuity
  correction of the correlation (Newcombe 1998, Statistics in Medicine 17:2635, method 10). It keeps its coverage if
  few or no scenarios change. It does not apply to several episodes per scenario; then the paired bootstrap over
  scenarios is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from components.errors import ArtifactError
from components.evaluation.proportions import newcombe, wilson
from components.evaluation.sequential import METHOD as SEQUENCE
from components.evaluation.sequential import confidence_sequence, paired_sequence
from components.trajectories.groups import by_scenario
from components.trajectories.schema import Trajectory
from components.trajectories.truncation import LIMITS

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns

CONFIDENCE = 0.95
RESAMPLES = 10_000
MOST_DRAWN = 4_000_000
"""Clusters that the bootstrap draws at a time; the result does not depend on it."""
SEED = 0
"""Seed of the bootstrap; the same episodes give the same interval."""

Estimate = tuple[float, Sequence[float] | None]
"""A value and its 95 % interval; None without one."""

_EMPTY = {"mean": None, "low": None, "high": None, "n": 0}


def summarise(episodes: EpisodeColumns | Sequence[Trajectory], alpha: float | None = None) -> dict[str, Any]:
    """Return the metrics of a policy's episodes. They carry their rewards. alpha: error rate of confidence sequences,
    for an evaluation that may stop early; None for a fixed number of scenarios.

    The result is `{"episodes", "scenarios", "failures": {"count", "by_boundary"}, "truncated", "unscored",
    "success", "reward", "turns", "invalid", "valid_success", "by_type", "by_difficulty"}`. `truncated` maps each limit
    that ended episodes to their number. The measures are `{"mean", "low", "high", "n"}`, with the number n of measured
    episodes and the 95 % interval from low to high. `invalid` is the share of the episodes with an action that the
    environment rejected, `valid_success` the success of the others: what a policy gains beyond learning which actions
    are legal. Both have n = 0 where the environment does not count such actions. `by_type` and `by_difficulty` map each
    type and each difficulty (as text, sorted) to the same metrics of its own episodes.
    """
    columns = _columns(episodes)
    return {
        **_measures(columns, alpha),
        "by_type": _by(columns, columns.types, alpha),
        "by_difficulty": _by(columns, columns.difficulties, alpha),
    }


def states_success(episodes: EpisodeColumns | Sequence[Trajectory]) -> bool:
    """Return False if no episode states its success, although some acted and ended by themselves: it is unknown."""
    finished = _finished(_columns(episodes))
    acted_N = finished.metric_N("parse_errors") != finished.metric_N("turns")
    for limit in LIMITS:
        acted_N &= ~(finished.metric_N(limit) >= 0)
    return bool(finished.stated_N.any() or not acted_N.any())


def without_success(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary of episodes of which none states its success: nothing was measured of it."""
    parts = {
        by: {name: without_success(part) for name, part in summary[by].items()}
        for by in ("by_type", "by_difficulty")
        if by in summary
    }
    return {**summary, "success": dict(_EMPTY), "valid_success": dict(_EMPTY), **parts}


def paired_difference(
    before: EpisodeColumns | Sequence[Trajectory],
    after: EpisodeColumns | Sequence[Trajectory],
    alpha: float | None = None,
) -> dict[str, Any]:
    """Return the difference in success rate, `after` minus `before`, on the scenarios that both finished. alpha: error
    rate of the confidence sequence, if one of the evaluations may have stopped early (`sequential.alpha_of`).

    The result is `{"difference", "low", "high", "before", "after", "n", "method", "improved", "regressed",
    "left_out"}`: success rates on the n shared scenarios, their difference with its 95 % interval, and the sorted ids
    of the scenarios that improved, regressed, or lack a finished episode on one side; with alpha also `confidence`,
    1 - alpha. Raises ArtifactError if the two sets share no finished scenario.
    """
    low: float | None
    high: float | None
    before, after = _columns(before), _columns(after)
    first, second = _success_by_scenario(before), _success_by_scenario(after)
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ArtifactError("cannot compare the two sets of episodes: they share no finished scenario")
    before_rates, after_rates = [fmean(first[name]) for name in shared], [fmean(second[name]) for name in shared]
    differences = [b - a for a, b in zip(before_rates, after_rates, strict=True)]
    if alpha is not None:
        low, high = paired_sequence(differences, alpha)
        method = SEQUENCE
    elif all(len(first[name]) == len(second[name]) == 1 for name in shared):
        counts = Counter(zip(before_rates, after_rates, strict=True))
        low, high = newcombe(both=counts[1, 1], gained=counts[0, 1], lost=counts[1, 0], neither=counts[0, 0])
        method = "newcombe"
    else:
        low, high = bootstrap([[difference] for difference in differences])
        method = "bootstrap"
    return {
        "difference": fmean(differences),
        "low": low,
        "high": high,
        "before": fmean(before_rates),
        "after": fmean(after_rates),
        "n": len(shared),
        "method": method,
        "improved": [name for name, difference in zip(shared, differences, strict=True) if difference > 0],
        "regressed": [name for name, difference in zip(shared, differences, strict=True) if difference < 0],
        "left_out": sorted({*before.group_names, *after.group_names} - set(shared)),
    } | ({} if alpha is None else {"confidence": 1 - alpha})


def paired_success(
    pairs: Mapping[
        str, tuple[EpisodeColumns | Sequence[Trajectory], EpisodeColumns | Sequence[Trajectory], float | None]
    ],
) -> dict[str, dict[str, Any]]:
    """Return the `paired_difference` of each named pair (before, after, alpha), without those that share no finished
    scenario."""
    differences = {}
    for name, pair in pairs.items():
        with suppress(ArtifactError):
            differences[name] = paired_difference(*pair)
    return differences


def paired_rewards(
    before: EpisodeColumns | Sequence[Trajectory], after: EpisodeColumns | Sequence[Trajectory]
) -> dict[str, Any]:
    """Return the difference in mean reward, `after` minus `before`, on the scenarios with a scored episode in both.

    The result has the form of `paired_difference`, with a bootstrap over scenarios. Raises ArtifactError if the two
    sets share no scored scenario.
    """
    before, after = _columns(before), _columns(after)
    first, second = (
        {name: fmean(values) for name, values in _clusters(side, side.reward_N).items()}
        for side in (_finished(before), _finished(after))
    )
    return _paired(first, second, {*before.group_names, *after.group_names})


def paired_means(
    before: Sequence[Trajectory], after: Sequence[Trajectory], measure: Callable[[Trajectory], float | None]
) -> dict[str, Any]:
    """Return the difference in the mean of a measure, which is None for an episode without it, in the form of
    `paired_rewards`. Raises ArtifactError if the two sets share no scenario with a measured episode."""
    groups = {trajectory.group for trajectory in [*before, *after]}
    return _paired(mean_by_scenario(before, measure), mean_by_scenario(after, measure), groups)


def _paired(first: dict[str, float], second: dict[str, float], groups: set[str]) -> dict[str, Any]:
    """Return the difference between the means of two sides by scenario. groups: all scenarios of both."""
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ArtifactError("cannot compare the two sets of episodes: they share no scored scenario")
    changes = {name: second[name] - first[name] for name in shared}
    low, high = bootstrap([[change] for change in changes.values()])
    return {
        "difference": fmean(changes.values()),
        "low": low,
        "high": high,
        "before": fmean(first[name] for name in shared),
        "after": fmean(second[name] for name in shared),
        "n": len(shared),
        "method": "bootstrap",
        "improved": [name for name, change in changes.items() if change > 0],
        "regressed": [name for name, change in changes.items() if change < 0],
        "left_out": sorted(groups - set(shared)),
    }


def interval_of(measure: Mapping[str, Any]) -> list[float] | None:
    """Return the ends of an interval; None if it has none."""
    return None if measure["low"] is None else [measure["low"], measure["high"]]


def mean_by_scenario(
    trajectories: Iterable[Trajectory], measure: Callable[[Trajectory], float | None]
) -> dict[str, float]:
    """Return the mean of a measure over the finished episodes of each scenario, without those that lack it."""
    measured = [trajectory for trajectory in trajectories if trajectory.failure is None]
    measured = [trajectory for trajectory in measured if measure(trajectory) is not None]
    return {
        name: fmean(measure(trajectory) or 0.0 for trajectory in group) for name, group in by_scenario(measured).items()
    }


def mean_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, its 95 % interval by Student's t distribution (`low`, `high`), and the number `n` of independent
    values, such as the results of several seeds. The interval is None for one value."""
    from scipy.stats import t

    n, mean = len(values), fmean(values)
    if n < 2:
        return {"mean": mean, "low": None, "high": None, "n": n}
    half = float(t.ppf(0.975, n - 1)) * stdev(values) / math.sqrt(n)
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n}


def seeds_interval(values: Sequence[float], inner: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return `mean_interval` of the results of several seeds, widened to include the mean of the intervals within each
    seed (`inner`): equal results of two seeds do not make the few scenarios of each certain."""
    measure = mean_interval(values)
    if measure["low"] is not None and len(inner) == len(values):
        measure["low"] = min(measure["low"], fmean(low for low, _ in inner))
        measure["high"] = max(measure["high"], fmean(high for _, high in inner))
    return measure


def seeds_difference(pairs: Sequence[tuple[Estimate, Estimate]]) -> dict[str, Any]:
    """Return the mean of after - before over seeds as `seeds_interval`. pairs: the estimates (before, after) of each
    seed. The interval within a seed combines those of its two estimates as if they were independent, which is too wide
    for estimates on the same scenarios (MOVER: Newcombe 1998, Stat Med 17:873, method 10)."""
    inner = []
    for (before, of_before), (after, of_after) in pairs:
        if of_before is not None and of_after is not None:
            below = math.hypot(after - of_after[0], of_before[1] - before)
            above = math.hypot(of_after[1] - after, before - of_before[0])
            inner.append((after - before - below, after - before + above))
    return seeds_interval([after - before for (before, _), (after, _) in pairs], inner)


def bootstrap(clusters: Sequence[Sequence[float]]) -> tuple[float, float] | tuple[None, None]:
    """Return the 95 % percentile interval of the mean over all values, resampling whole clusters with replacement.

    Return (None, None) for fewer than two clusters: a single cluster does not show the variation between clusters.
    """
    import numpy as np

    count = len(clusters)
    if count < 2:
        return None, None
    totals_B = np.array([math.fsum(cluster) for cluster in clusters])
    sizes_B = np.array([len(cluster) for cluster in clusters])
    generator = np.random.default_rng(SEED)
    means = []
    chunk = max(1, min(500, MOST_DRAWN // count))
    for start in range(0, RESAMPLES, chunk):  # in chunks, to bound memory
        drawn = generator.integers(count, size=(min(chunk, RESAMPLES - start), count))
        means.append(totals_B[drawn].sum(axis=1) / sizes_B[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _columns(episodes: EpisodeColumns | Sequence[Trajectory]) -> EpisodeColumns:
    from components.trajectories.columns import EpisodeColumns
    from components.trajectories.stored import episodes_of

    return episodes if isinstance(episodes, EpisodeColumns) else episodes_of(episodes).columns


def _finished(episodes: EpisodeColumns) -> EpisodeColumns:
    return episodes.take((~episodes.failed_N).nonzero()[0])


def _measures(episodes: EpisodeColumns, alpha: float | None) -> dict[str, Any]:
    boundaries = [boundary for boundary in episodes.boundaries if boundary is not None]
    finished = _finished(episodes)
    rejected_N = finished.number_N("invalid_actions")
    means = {
        "reward": _mean(_clusters(finished, finished.reward_N).values()),
        "turns": _mean(_clusters(finished, finished.metric_N("turns")).values()),
        "invalid": _rate(_clusters(finished, rejected_N > 0, rejected_N >= 0)),
        "valid_success": _rate(_clusters(finished, finished.success_N, rejected_N == 0)),
    }
    if alpha is not None:
        means = {name: {**measure, "low": None, "high": None} for name, measure in means.items()}
    return {
        "episodes": len(episodes),
        "scenarios": len(episodes.group_names),
        "failures": {"count": len(boundaries), "by_boundary": dict(sorted(Counter(boundaries).items()))},
        "truncated": {limit: count for limit in LIMITS if (count := int((finished.metric_N(limit) > 0).sum()))},
        "unscored": int((~finished.scored_N).sum()),
        "success": _rate(_clusters(finished, finished.success_N), alpha),
        **means,
    }


def pass_at_k(episodes: EpisodeColumns | Sequence[Trajectory], k: int) -> dict[str, Any]:
    """Return the probability that at least one of k samples of a scenario succeeds (pass@k, arXiv:2107.03374, eq. 1),
    and that all k succeed (pass^k, arXiv:2406.12045), means over scenarios.

    The result is `{"pass_at_k", "pass_hat_k", "left_out"}`: two measures as in `summarise`, and the number of scenarios
    with fewer than k finished episodes, which count in neither.
    """
    counts = [(len(group), round(sum(group))) for group in _success_by_scenario(_columns(episodes)).values()]
    enough = [(n, c) for n, c in counts if n >= k]
    return {
        "pass_at_k": _mean_of([any_of_k(n, c, k) for n, c in enough]),
        "pass_hat_k": _mean_of([all_of_k(n, c, k) for n, c in enough]),
        "left_out": len(counts) - len(enough),
    }


def any_of_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from c successes among n >= k samples: 1 - C(n-c, k) / C(n, k)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def all_of_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass^k from c successes among n >= k samples: C(c, k) / C(n, k)."""
    return math.comb(c, k) / math.comb(n, k)


def _mean_of(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean over scenarios with its interval."""
    if not values:
        return dict(_EMPTY)
    low, high = bootstrap([[value] for value in values])
    return {"mean": fmean(values), "low": low, "high": high, "n": len(values)}


def _rate(clusters: dict[str, list[float]], alpha: float | None = None) -> dict[str, Any]:
    """Return the mean of values of 0 and 1, given by scenario, with its interval."""
    values = [value for cluster in clusters.values() for value in cluster]
    n, successes = len(values), round(sum(values))
    if clusters and alpha is not None:
        low, high = confidence_sequence([fmean(cluster) for cluster in clusters.values()], alpha)
    elif not clusters or len(clusters) < n:
        return _mean(clusters.values())
    else:
        low, high = wilson(successes, n)
    return {"mean": successes / n, "low": low, "high": high, "n": n}


def mean_measure(episodes: EpisodeColumns, value_N: Array) -> dict[str, Any]:
    """Return the mean of a value over the finished episodes that have one, with its interval: a measure as in
    `summarise`. value_N: NaN where it is missing."""
    return _mean(_clusters(episodes, value_N, ~episodes.failed_N).values())


def _mean(clusters: Iterable[Sequence[float]]) -> dict[str, Any]:
    """Return the mean over all values of the scenarios with its interval."""
    clusters = list(clusters)
    values = [x for cluster in clusters for x in cluster]
    if not values:
        return dict(_EMPTY)
    low, high = bootstrap(clusters)
    return {"mean": fmean(values), "low": low, "high": high, "n": len(values)}


def _by(episodes: EpisodeColumns, keys: Sequence[Any], alpha: float | None) -> dict[str, Any]:
    import numpy as np

    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return {str(name): _measures(episodes.take(np.array(places[name])), alpha) for name in sorted(places)}


def _success_by_scenario(episodes: EpisodeColumns) -> dict[str, list[float]]:
    finished = _finished(episodes)
    return _clusters(finished, finished.success_N)


def _clusters(episodes: EpisodeColumns, value_N: Array, where_N: Array | bool = True) -> dict[str, list[float]]:
    """Return the values by scenario, in the order of the first episodes, where the mask is True, without NaN."""
    clusters: dict[str, list[float]] = {}
    included_N = (value_N == value_N) & where_N
    for name, value, included in zip(
        episodes.group_texts, value_N.astype(float).tolist(), included_N.tolist(), strict=True
    ):
        if included:
            clusters.setdefault(name, []).append(value)
    return clusters
