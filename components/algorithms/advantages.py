"""Advantages of the trajectories of one scenario.

GRPO (arXiv:2402.03300, eq. 3.2): A_i = (r_i - mean(r)) / (std(r) + 1e-6), with the population standard deviation.
Dr. GRPO (arXiv:2503.20783) leaves the division out. A group whose rewards have no spread carries no signal: its
advantages are exactly zero, whatever the size of the rewards.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from components.trajectories.groups import have_spread

EPSILON = 1e-6


def group_advantages(rewards_G: Sequence[float], *, scale: bool) -> list[float]:
    """(G,) rewards of one group to (G,) advantages; `scale` divides by the standard deviation."""
    if not have_spread(rewards_G):
        return [0.0] * len(rewards_G)
    mean = statistics.mean(rewards_G)  # exact inside: sums and squares of huge or tiny rewards would leave the floats
    centred = [reward - mean for reward in rewards_G]
    if not scale:
        return centred
    deviation = statistics.pstdev(rewards_G)
    return [value / (deviation + EPSILON) for value in centred]
