"""Measures of what `algorithm.scale` divides by, for the guard `amplified_rewards`.

Dividing by the standard deviation gives a group whose returns hardly differ the same weight as a group with failures
and successes (the difficulty bias of Dr. GRPO, arXiv:2503.20783, section 3.1): a length penalty of 0.001 among equal
rewards becomes an advantage of about 1. Compared with the range of rewards, the divisor says by how much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from components.trajectories.groups import have_spread

if TYPE_CHECKING:
    from components.algorithms.policy_gradient.advantages import Scale

DIVISOR, RANGE = "advantage_divisor", "reward_range"
"""Metrics: the divisor that at least a tenth of the groups do not exceed, and the range of all returns."""
SHARE = 0.1
"""Share of the groups with spread that have at most the divisor of the metric."""


def scaling_metrics(returns_G: Sequence[Sequence[float]], scale: Scale) -> dict[str, float]:
    """Return the metrics of the returns of episodes, by group; none if nothing is divided.

    Groups without spread have advantages of 0, so they do not count."""
    returns = list(chain(*returns_G))
    compared = {"group": returns_G, "batch": [returns], "none": []}[scale]
    divisors = sorted(statistics.pstdev(values) for values in compared if have_spread(values))
    if not divisors:
        return {}
    return {DIVISOR: divisors[math.ceil(SHARE * len(divisors)) - 1], RANGE: max(returns) - min(returns)}
