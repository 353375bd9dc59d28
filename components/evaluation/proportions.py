"""Intervals of a proportion, and of the difference of two paired ones."""

from __future__ import annotations

import math
from statistics import NormalDist

_Z = NormalDist().inv_cdf(0.975)


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion; n > 0.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    """
    p, shrink = successes / n, 1 + _Z**2 / n
    centre = (p + _Z**2 / (2 * n)) / shrink
    half = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2)) / shrink
    # At the ends the limit is exactly 0 or 1; rounding errors could exceed it.
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def independent_difference(after: tuple[float, float], before: tuple[float, float]) -> tuple[float, float]:
    """Return the 95 % interval of p_after - p_before of two samples, each (successes, n); n > 0.

    Newcombe 1998, method 10: with Wilson's limits l, u of each proportion, as `newcombe` with φ = 0.
    """
    (p_a, (l_a, u_a)), (p_b, (l_b, u_b)) = [(successes / n, wilson(successes, n)) for successes, n in (after, before)]
    return p_a - p_b - math.hypot(p_a - l_a, u_b - p_b), p_a - p_b + math.hypot(u_a - p_a, p_b - l_b)


def newcombe(*, both: float, gained: float, lost: float, neither: float) -> tuple[float, float]:
    """Return the 95 % interval of p_after - p_before from the counts of pairs.

    The counts are successes in both, after only (gained), before only (lost) and in neither; at least one pair. A
    design effect makes them fractions.

    With Wilson's limits l, u of each proportion and φ the correlation of the pairs (continuity-corrected if positive,
    0 if a margin is empty):

        low  = d - √((pₐ-lₐ)² - 2φ(pₐ-lₐ)(u_b-p_b) + (u_b-p_b)²)
        high = d + √((uₐ-pₐ)² - 2φ(uₐ-pₐ)(p_b-l_b) + (p_b-l_b)²)
    """
    n = both + gained + lost + neither
    after, before = (both + gained) / n, (both + lost) / n
    low_after, high_after = wilson(both + gained, n)
    low_before, high_before = wilson(both + lost, n)
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    association = both * neither - gained * lost
    corrected = association if association < 0 else max(association - n / 2, 0)
    phi = corrected / math.sqrt(margins) if margins else 0.0

    def distance(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * phi * x * y + y * y, 0.0))

    difference = after - before
    low = difference - distance(after - low_after, high_before - before)
    high = difference + distance(high_after - after, before - low_before)
    return low, high
