"""Credit of turns: the turns that are compared with each other, and the advantages that follow.

The returns of turns depend on the place of a turn: with a reward of 1 for each of four turns they are 4, 3, 2, 1. So a
return is compared with those of comparable turns only (`turn_baseline`):

    index     turns with the same index in their episode
    state     turns taken in the same state (GiGPO, arXiv:2505.10978): A = A_episode + state_weight · A_turn, where
              A_episode compares the total returns of episodes, which are not discounted (eq. 3), and A_turn the
              discounted returns (eq. 5) of turns in the same state, which is the last observation before the turn. A
              turn whose state occurs once has A_episode alone.
    process   GRPO with process supervision (arXiv:2402.03300, section 4.1.3): all step rewards of the group are
              normalised, and the advantage of a turn is the discounted sum of them from the turn on.

In each of them, episodes with the same step rewards in the same turns have advantages of exactly zero.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence
from typing import Literal

from components.algorithms.policy_gradient.advantages import Baseline, Returns, Scale, advantages
from components.algorithms.policy_gradient.returns import discounted_sums
from components.trajectories.groups import have_spread
from components.trajectories.schema import Trajectory

TurnBaseline = Literal["index", "state", "process"]


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

    groups: returns of the turns of each episode of each group. totals: total return of each episode, which is compared
    with `turn_baseline: state` alone. trajectories: the episodes.
    """
    if turn_baseline == "index":
        cells = [[list(range(len(episode))) for episode in group] for group in groups]
        return advantages(groups, baseline=baseline, scale=scale, cells=cells)
    whole = [
        [[total] if episode else [] for episode, total in zip(group, group_totals, strict=True)]
        for group, group_totals in zip(groups, totals, strict=True)
    ]
    episodes = advantages(whole, baseline=baseline, scale=scale)
    states = [[turn_states(trajectory) for trajectory in group] for group in trajectories]
    turns = advantages(groups, baseline=baseline, scale=scale, cells=states)
    return [
        [
            [of_episode[0] + state_weight * turn for turn in of_turns]
            for of_episode, of_turns in zip(of_episodes, of_group, strict=True)
        ]
        for of_episodes, of_group in zip(episodes, turns, strict=True)
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
    """Return the state in which each turn was taken, over all histories: a digest of the messages that the agent read
    since its previous turn, and of the agent."""
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
    """Return whether all episodes of a group have the same step rewards."""
    lengths = {len(episode) for episode in rewards}
    return len(lengths) == 1 and not any(have_spread(turn) for turn in zip(*rewards, strict=True))
