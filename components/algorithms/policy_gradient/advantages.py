"""Advantages: baseline and scale of returns.

An episode has one return, one per turn, or one per token (`returns`). An advantage is a return minus a baseline,
divided by a scale:

    baseline   group           mean of the group (GRPO, arXiv:2402.03300, eq. 3.2)
               leave_one_out   mean of the other episodes of the group (RLOO, arXiv:2402.14740, eq. 7)
               batch           mean of all groups (REINFORCE++, arXiv:2501.03262)
               none            0
    scale      group           standard deviation of the group + 1e-6 (GRPO)
               batch           standard deviation of all groups + 1e-6 (REINFORCE++)
               none            1 (Dr. GRPO, arXiv:2503.20783)

Returns are compared within their cell: means and standard deviations are computed over the returns of the group or
batch in the same cell. Returns of whole episodes share one cell. Returns of turns have one cell per turn index, or per
state in which the turn was taken (`turn_credit`). Without cells, the position of a turn in its episode would count as
merit: with positive rewards, early turns have larger returns than late turns, whatever the actions.

Standard deviations are population standard deviations. If the compared returns of a cell have no spread, their
advantages are exactly zero, whatever the size of the returns. If returns without spread are compared with a different
set, or with 0, they are not divided, because they define no scale.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal

from components.trajectories.groups import have_spread

EPSILON = 1e-6

Baseline = Literal["group", "leave_one_out", "batch", "none"]
Scale = Literal["group", "batch", "none"]
Returns = list[list[float]]
"""Returns of one group: a list per episode."""
Cells = Sequence[Sequence[Hashable]]
"""Cells of the returns of one group, by episode."""


def advantages(
    groups: Sequence[Returns], *, baseline: Baseline, scale: Scale, cells: Sequence[Cells] | None = None
) -> list[Returns]:
    """Return the advantages of all groups, in the shape of their returns. cells has the same shape; None puts all
    returns into one cell."""
    cells = cells or [[[None] * len(episode) for episode in group] for group in groups]
    batch: dict[Hashable, list[float]] = defaultdict(list)
    for cell, value in _pairs(chain(*groups), chain(*cells)):
        batch[cell].append(value)
    means = {cell: statistics.mean(values) for cell, values in batch.items()} if baseline == "batch" else {}
    divisors = {cell: _divisor(values) for cell, values in batch.items()} if scale == "batch" else {}
    result: list[Returns] = []
    for group, group_cells in zip(groups, cells, strict=True):
        members: dict[Hashable, list[float]] = defaultdict(list)
        for cell, value in _pairs(group, group_cells):
            members[cell].append(value)
        compared = batch if baseline == "batch" else members
        signal = {cell: baseline == "none" or have_spread(compared[cell]) for cell in members}
        if baseline == "group":
            means = {cell: statistics.mean(values) for cell, values in members.items()}
        if scale == "group":
            divisors = {cell: _divisor(values) for cell, values in members.items()}
        result.append([])
        for index, (episode, episode_cells) in enumerate(zip(group, group_cells, strict=True)):
            if baseline == "leave_one_out":
                means = _means_of_others(group, group_cells, index)
            result[-1].append(
                [
                    # Without other episodes in its cell, a return is compared with itself.
                    (value - means.get(cell, 0.0 if baseline == "none" else value)) / divisors.get(cell, 1.0)
                    if signal[cell]
                    else 0.0
                    for cell, value in zip(episode_cells, episode, strict=True)
                ]
            )
    return result


def _pairs(
    episodes: Iterable[Sequence[float]], cells: Iterable[Sequence[Hashable]]
) -> Iterator[tuple[Hashable, float]]:
    for values, episode_cells in zip(episodes, cells, strict=True):
        yield from zip(episode_cells, values, strict=True)


def _means_of_others(group: Returns, cells: Cells, index: int) -> dict[Hashable, float]:
    """Return the mean per cell over all episodes of the group except one."""
    others: dict[Hashable, list[float]] = defaultdict(list)
    for cell, value in _pairs([*group[:index], *group[index + 1 :]], [*cells[:index], *cells[index + 1 :]]):
        others[cell].append(value)
    return {cell: statistics.mean(values) for cell, values in others.items()}


def _divisor(values: Sequence[float]) -> float:
    # The statistics module sums exactly: float sums of huge or tiny returns could overflow or underflow.
    return EPSILON + statistics.pstdev(values) if have_spread(values) else 1.0
