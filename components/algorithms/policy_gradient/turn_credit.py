"""Turn-level credit: comparison of turns, and the resulting advantages.

The returns of turns depend on the position of a turn: with a reward of 1 for each of four turns they are 4, 3, 2, 1. So
a return is compared only with the returns of comparable turns (`turn_baseline`):

    index     turns with the same index in their episode
    state     turns taken in the same state (GiGPO, arXiv:2505.10978): A = A_episode + state_weight · A_turn, where
              A_episode compares the undiscounted total returns of episodes (eq. 3), and A_turn the discounted returns
              (eq. 5) of turns in the same state, which is the last observation before the turn. A turn whose state
              occurs once has A_episode alone.
    process   GRPO with process supervision (arXiv:2402.03300, section 4.1.3): all step rewards of the group are
              normalised, and the advantage of a turn is their discounted sum from the turn on.

In all three, episodes with the same step rewards in the same turns have advantages of exactly zero.
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
