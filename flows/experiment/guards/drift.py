"""Drift: metrics of the last rounds against those of the first rounds of the run.

With x_r the value of a metric in round r and F = (x_1 + x_2) / 2, the metric has drifted at round r ≥ 4 if

    x_(r-1) > limit  and  x_r > limit       limit = F · factor, or F + rise
    x_(r-1) < floor  and  x_r < floor       floor = F / factor; only if `both` directions count

A single round never triggers a guard, and no guard triggers before round 4: two rounds set the baseline, and two other
rounds must exceed it.

A learning agent may need longer messages, so a rule can require that success has not clearly risen. With p the success
rate and n the finished episodes of two rounds together, success has clearly risen if

    p_last - p_first > z · √(p_last (1 - p_last) / n_last + p_first (1 - p_first) / n_first)      z = 1.96
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from flows.experiment.guards.rules import numbers

ENDS = 2
"""Number of first and of last rounds that are compared."""
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class RoundMetrics:
    """Metrics of one round that drift is measured on."""

    figures: Mapping[str, float]
    """Values by metric name; unknown metrics are absent."""
    success: float | None = None
    """Success rate; None if unknown."""
    episodes: float = 0.0
    """Number of finished episodes."""


def first_and_last(rounds: Mapping[int, RoundMetrics]) -> tuple[list[int], list[int]] | None:
    """Return the numbers of the rounds that are compared; None if there are fewer than four."""
    ordered = sorted(rounds)
    return (ordered[:ENDS], ordered[-ENDS:]) if len(ordered) >= 2 * ENDS else None


def drift_message(
    rounds: Mapping[int, RoundMetrics],
    name: str,
    words: str,
    *,
    factor: float | None = None,
    rise: float | None = None,
    both: bool = False,
    ignore_success: bool = False,
) -> str | None:
    """Return a message on a metric that has drifted by `factor` or by `rise`, else None. Return None also if the last
    round lacks the metric, or, unless `ignore_success`, if success has clearly risen. words: description of the
    metric."""
    measured = {number: metrics for number, metrics in rounds.items() if name in metrics.figures}
    ends = first_and_last(measured)
    if ends is None or max(measured) != max(rounds):
        return None
    first, last = ([measured[number].figures[name] for number in end] for end in ends)
    baseline = sum(first) / ENDS
    limit = baseline * factor if factor is not None else baseline + (rise or 0.0)
    floor = baseline / factor if both and factor is not None else -math.inf
    up, down = min(last) > limit, max(last) < floor
    if (factor is not None and baseline <= 0) or not (up or down) or (not ignore_success and success_rose(measured)):
        return None
    bound = limit if up else floor
    by = f"{factor:g} times" if factor is not None else f"{rise:g}"
    direction = "rose" if up else "fell"
    return (
        f"{words} {direction} from {baseline:.3g} ({numbers(ends[0])}) to {last[0]:.3g} and {last[1]:.3g} "
        f"({numbers(ends[1])}), {'above' if up else 'below'} {bound:.3g} ({by})"
        + ("" if ignore_success else _success_clause(measured))
    )


def success_rose(rounds: Mapping[int, RoundMetrics]) -> bool:
    """Return True if success of the last two rounds is significantly above that of the first two (z-test, 97.5 %);
    False if it is unknown."""
    rates = _success(rounds)
    if rates is None:
        return False
    (before, n), (after, m) = rates
    return after - before > _Z * math.sqrt(after * (1 - after) / m + before * (1 - before) / n)


def _success(rounds: Mapping[int, RoundMetrics]) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Return success rate and number of episodes of the first and of the last rounds; None if unknown."""
    ends = first_and_last(rounds)
    if ends is None:
        return None
    rates = []
    for end in ends:
        metrics = [rounds[number] for number in end]
        count = sum(one_round.episodes for one_round in metrics)
        if count == 0 or any(one_round.success is None for one_round in metrics):
            return None
        rates.append((sum((one_round.success or 0.0) * one_round.episodes for one_round in metrics) / count, count))
    return rates[0], rates[1]


def _success_clause(rounds: Mapping[int, RoundMetrics]) -> str:
    rates = _success(rounds)
    if rates is None:
        return ""
    return f", while success went from {rates[0][0]:.3f} to {rates[1][0]:.3f}"
