"""Sequential testing of two policies on the same scenarios: an interval that is valid at every number of scenarios.

An evaluation that stops when its interval excludes 0 looks at the data many times, and an interval for a fixed number
of scenarios would err too often. A confidence sequence contains the true mean at all times at once with probability
1 - α, so it stays valid for any rule that ends the evaluation, and for any comparison made afterwards.

For values x in [0, 1], scenario by scenario, the capital of a bettor against the mean m is

    K_n(m) = ∫ Π_i (b x_i / m + (1 - b) (1 - x_i) / (1 - m)) dF(b)

Under the true mean each factor has expectation 1, so K_n(m) is a non-negative martingale, and by Ville's inequality
P(exists n: K_n(m) >= 1 / α) <= α. The confidence sequence is the set of all m with K_n(m) < 1 / α (betting confidence
sequence, Waudby-Smith and Ramdas 2024, JRSS-B 86:1, arXiv:2010.09686; the mixture over b is that of universal
portfolios, Orabona and Jun 2024, arXiv:2110.14099, here with F = Beta(2, 2)). K_n(m) is log-convex in m, because 1 / m
and 1 / (1 - m) are, so the set is an interval; it contains the sample mean. It does not depend on the order of the
values.

A paired difference d in [-1, 1] is the value x = (d + 1) / 2. Against m = 1/2 scenarios without a difference leave the
capital unchanged: with one episode per scenario the test is a sequential sign test of those that changed.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

from components.evaluation.verdict import POWER, smallest

METHOD = "sequence"
"""Name of the method in results of `components.evaluation.metrics.paired_difference`."""
TITLE = "paired by scenario, betting confidence sequence (Waudby-Smith and Ramdas 2024)"
NODES = 128
"""Nodes of the mixture over bets."""
MOST_SCENARIOS = 1_000_000
"""Largest number of scenarios that `scenarios_to_decide` returns."""
_STEPS = 60
"""Bisection steps of an end of the interval."""


def confidence_sequence(values: Sequence[float], alpha: float) -> tuple[float, float]:
    """Return the interval of the mean of values in [0, 1] after these; (0, 1) before the first."""
    counts = Counter(values)
    mean = math.fsum(values) / len(values) if values else 0.5
    limit = math.log(1 / alpha)

    def excluded(m: float) -> bool:
        return log_capital(counts, m) >= limit

    return _end(excluded, 0.0, mean), _end(excluded, 1.0, mean)


def paired_sequence(differences: Sequence[float], alpha: float) -> tuple[float, float]:
    """Return the interval of the mean of paired differences in [-1, 1]."""
    low, high = confidence_sequence([(difference + 1) / 2 for difference in differences], alpha)
    return 2 * low - 1, 2 * high - 1


def log_capital(counts: Mapping[float, float], m: float) -> float:
    """Return log K_n(m). counts: number of times of each value. m: in (0, 1)."""
    import numpy as np

    bets, log_weights = _mixture()
    wealth = log_weights.copy()
    with np.errstate(divide="ignore"):
        for x, count in counts.items():
            wealth += count * np.log(bets * x / m + (1 - bets) * (1 - x) / (1 - m))
    return float(np.logaddexp.reduce(wealth))


@functools.cache
def _mixture() -> tuple[Any, Any]:
    """Return nodes and log weights of Beta(2, 2), by Gauss and Legendre. The weights sum to 1, so that the discrete
    mixture is exact."""
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    bets = (nodes + 1) / 2
    density = weights * bets * (1 - bets)
    return bets, np.log(density / density.sum())


def _end(excluded: Callable[[float], bool], end: float, mean: float) -> float:
    """Return the end of the interval between `end`, which is 0 or 1, and the sample mean, by bisection."""
    outside, inside = end, mean
    if outside == inside:
        return end
    for _ in range(_STEPS):
        middle = (outside + inside) / 2
        if excluded(middle):
            outside = middle
        else:
            inside = middle
    return outside


def alpha_of(*summaries: Mapping[str, Any]) -> float | None:
    """Return the error rate for intervals of a comparison in which one of these evaluations may have stopped early, the
    smallest of theirs; None if all play a fixed number of scenarios. summaries: `summary.json` of the evaluations."""
    rates = [summary["sequence"]["alpha"] for summary in summaries if "sequence" in summary]
    return min(rates, default=None)


def describe(sequence: Mapping[str, Any]) -> str:
    """Return the end of an evaluation as text. sequence: that of its summary."""
    played, planned = sequence["scenarios"], sequence["planned"]
    level = f"{1 - sequence['alpha']:.4g}"
    if sequence["decided"]:
        return f"decided after {played} of {planned} scenarios (confidence sequence, level {level})"
    return f"not decided by all {planned} scenarios (confidence sequence, level {level})"


def scenarios_to_decide(gain: float, discordance: float, alpha: float) -> int:
    """Return the number of scenarios by which a gain is decided with a probability of about 80 %.

    discordance: share of scenarios that exactly one of the two policies solves; at least the gain. The sum of n
    differences is taken at its quantile n δ - z √(n (ψ - δ²)) by the normal approximation, as in
    `verdict.paired_scenarios`, and the capital against 0 at that sum. At most MOST_SCENARIOS.
    """
    gain = abs(gain)
    share = max(discordance, gain)
    z = NormalDist().inv_cdf(POWER)

    def enough(n: int) -> bool:
        total = n * gain - z * math.sqrt(n * max(share - gain**2, 0.0))
        changed = max(n * share, total)
        if total <= 0:
            return False
        counts = {1.0: (changed + total) / 2, 0.0: (changed - total) / 2}
        return log_capital(counts, 0.5) >= math.log(1 / alpha)

    return smallest(enough, MOST_SCENARIOS, start=1) or MOST_SCENARIOS
