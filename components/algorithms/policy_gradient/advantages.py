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
state in which the turn was taken. Without cells, the position of a turn in its episode would count as merit: with a
reward of 1 for each of four turns the returns are 4, 3, 2, 1, whatever the actions. Comparable turns (`turn_baseline`):

    index     turns with the same index in their episode
    state     turns taken in the same state (GiGPO, arXiv:2505.10978): A = A_episode + state_weight · A_turn, where
              A_episode compares the undiscounted total returns of episodes (eq. 3), and A_turn the discounted returns
              (eq. 5) of turns in the same state, which is the last observation before the turn. A turn whose state
              occurs once has A_episode alone.
    process   GRPO with process supervision (arXiv:2402.03300, section 4.1.3): all step rewards of the group are
              normalised, and the advantage of a turn is their discounted sum from the turn on.

In all three, episodes with the same step rewards in the same turns have advantages of exactly zero.

Standard deviations are population standard deviations. If the compared returns of a cell have no spread, their
advantages are exactly zero, whatever the size of the returns. If returns without spread are compared with a different
set, or with 0, they are not divided, because they define no scale.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal

from components.algorithms.policy_gradient.returns import discounted_sums
from components.trajectories.groups import have_spread
from components.trajectories.schema import Trajectory

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


def turn_advantages(
    groups: Sequence[Returns],
    totals: Sequence[Sequence[float]],
    trajectories: Sequence[Sequence[Trajectory]],
    *,
    turn_baseline: Literal["index", "state"],
    baseline: Baseline,
    scale: Scale,
    state_weight: float,
) -> list[Returns]:
    """Return the advantage of each turn from its return.

    groups: turn returns of each episode of each group. totals: total return of each episode, used only with
    `turn_baseline: state`. trajectories: the episodes.
    """
    if turn_baseline == "index":
        cells = [[list(range(len(episode))) for episode in group] for group in groups]
        return advantages(groups, baseline=baseline, scale=scale, cells=cells)
    episode_returns = [
        [[total] if episode else [] for episode, total in zip(group, group_totals, strict=True)]
        for group, group_totals in zip(groups, totals, strict=True)
    ]
    episodes = advantages(episode_returns, baseline=baseline, scale=scale)
    states = [[turn_states(trajectory) for trajectory in group] for group in trajectories]
    turns = advantages(groups, baseline=baseline, scale=scale, cells=states)
    return [
        [
            [episode_advantage[0] + state_weight * turn for turn in turn_values]
            for episode_advantage, turn_values in zip(group_episodes, group_turns, strict=True)
        ]
        for group_episodes, group_turns in zip(episodes, turns, strict=True)
    ]


def process_advantages(
    groups: Sequence[Returns], *, baseline: Baseline, scale: Scale, discount: float
) -> list[Returns]:
    """Return the advantage of each turn from the step rewards of each episode of each group."""
    normalised = advantages(groups, baseline=baseline, scale=scale)
    result = []
    for rewards, values in zip(groups, normalised, strict=True):
        if baseline in ("group", "leave_one_out") and _alike(rewards):
            result.append([[0.0] * len(episode) for episode in rewards])
        else:
            result.append([discounted_sums(episode, discount) for episode in values])
    return result


def turn_states(trajectory: Trajectory) -> list[Hashable]:
    """Return the state in which each turn was taken, over all histories: a digest of the agent's name and of the
    messages that the agent read since its previous turn."""
    states: list[Hashable] = []
    for history in trajectory.histories:
        observation: list[list[str]] = []
        for message in history.messages:
            if message.role == "assistant":
                if message.span is not None:
                    text = json.dumps([history.agent, observation])
                    states.append(hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest())
                observation = []
            else:
                observation.append([message.role, message.content])
    return states


def _alike(rewards: Returns) -> bool:
    """Return True if all episodes of a group have the same step rewards."""
    lengths = {len(episode) for episode in rewards}
    return len(lengths) == 1 and not any(have_spread(turn) for turn in zip(*rewards, strict=True))
