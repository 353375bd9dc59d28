"""Advantages: what is compared with what, and in which unit.

An episode has one return, or one for each of its turns, or one for each of its tokens (`returns`). An advantage is a
return minus a baseline, divided by a scale:

    baseline   group           mean of the group (GRPO, arXiv:2402.03300, eq. 3.2)
               leave_one_out   mean of the other episodes of the group (RLOO, arXiv:2402.14740, eq. 7)
               batch           mean of all groups (REINFORCE++, arXiv:2501.03262)
               none            0
    scale      group           standard deviation of the group + 1e-6 (GRPO)
               batch           that of all groups + 1e-6 (REINFORCE++)
               none            1 (Dr. GRPO, arXiv:2503.20783)

Standard deviations are those of the population. Returns without spread carry no signal where they are compared: their
advantages are exactly zero, whatever the size of the returns. Compared with something else, such returns are divided by
nothing: they have no unit of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from components.trajectories.groups import have_spread

EPSILON = 1e-6

Baseline = Literal["group", "leave_one_out", "batch", "none"]
Scale = Literal["group", "batch", "none"]
Returns = list[list[float]]
"""Of one group: the returns of each episode."""


def advantages(groups: Sequence[Returns], *, baseline: Baseline, scale: Scale) -> list[Returns]:
    """The advantages of all groups, in the shape of their returns."""
    everything = [value for group in groups for value in _flat(group)]
    if baseline == "batch" and not have_spread(everything):
        return [[[0.0] * len(episode) for episode in group] for group in groups]
    mean = statistics.mean(everything) if baseline == "batch" else 0.0
    deviation = statistics.pstdev(everything) if scale == "batch" and everything else 0.0
    found = []
    for group in groups:
        if baseline in ("group", "leave_one_out") and not have_spread(_flat(group)):
            found.append([[0.0] * len(episode) for episode in group])
            continue
        centred = _centred(group, baseline, mean)
        divisor = 1.0
        if scale != "none" and have_spread(everything if scale == "batch" else _flat(group)):
            divisor = EPSILON + (deviation if scale == "batch" else statistics.pstdev(_flat(group)))
        found.append([[value / divisor for value in episode] for episode in centred])
    return found


def group_advantages(rewards_G: Sequence[float], *, scale: bool) -> list[float]:
    """(G,) rewards of one group to (G,) advantages of GRPO; without `scale` those of Dr. GRPO."""
    one_each = [[reward] for reward in rewards_G]
    return _flat(advantages([one_each], baseline="group", scale="group" if scale else "none")[0])


def _centred(group: Returns, baseline: Baseline, mean_of_all: float) -> Returns:
    # statistics.mean is exact inside: sums of huge or tiny returns would leave the floats
    if baseline == "leave_one_out":
        centred = []
        for index, episode in enumerate(group):
            others = _flat(group[:index] + group[index + 1 :])
            mean = statistics.mean(others) if others else None
            centred.append([0.0 if mean is None else value - mean for value in episode])
        return centred
    mean = {"batch": mean_of_all, "none": 0.0}.get(baseline)
    if mean is None:
        mean = statistics.mean(_flat(group))
    return [[value - mean for value in episode] for episode in group]


def _flat(group: Iterable[list[float]]) -> list[float]:
    return [value for episode in group for value in episode]
