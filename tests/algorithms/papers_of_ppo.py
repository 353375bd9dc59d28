"""PPO with a critic as in the papers, in plain torch (arXiv:1707.06347, arXiv:2203.02155), independent of the library.
See `papers`.

The actions of an episode are its sampled tokens, over all turns and histories, as one chain in their order. The critic
has its own λ (arXiv:2504.05118, section 4.1) and learns normalised values (arXiv:2103.01955, section 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.algorithms.papers import EPSILON, ESTIMATORS, Columns, Episode, episode_loss, overlong, weight


def rewards(spec: Any, episode: Episode, kl: Sequence[float]) -> list[float]:
    """Return the reward of each action: minus its weighted KL divergence from the reference, plus the judged reward at
    the last action of the episode, or the step reward at the last action of each turn."""
    result = [-spec.kl_coefficient * value for value in kl]
    if spec.credit == "episode":
        result[-1] += episode.reward
    else:
        for turn, reward in enumerate(episode.step_rewards):
            result[max(position for position, turn_index in enumerate(episode.turn) if turn_index == turn)] += reward
    result[-1] += overlong(spec, episode.tokens)
    return result


def gae(discount: float, lambda_: float, rewards_A: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return the advantages of arXiv:1506.02438, eq. 16, as a sum."""
    next_values = [*values[1:], 0.0]
    deltas = [r + discount * next_value - v for r, next_value, v in zip(rewards_A, next_values, values, strict=True)]
    decay = discount * lambda_
    return [sum(decay ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def moments(spec: Any, rewards_of_episodes: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return mean and standard deviation of the discounted returns of a critic's first round, over its tokens; 0 and 1
    if it does not normalise."""
    if spec.value_norm_decay is None:
        return 0.0, 1.0
    returns = [
        sum(spec.discount ** (k - t) * episode[k] for k in range(t, len(episode)))
        for episode in rewards_of_episodes
        for t in range(len(episode))
    ]
    deviation, mean = torch.std_mean(torch.tensor(returns, dtype=torch.float64), correction=0)
    return float(mean), float(deviation)


def ppo(
    spec: Any,
    episodes: Sequence[Episode],
    columns: Sequence[Columns],
    values: Sequence[torch.Tensor],
    old_values: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return a loss whose gradient is that of a gradient step in a critic's first round. values: normalised values of
    the critic in training, with gradient. old_values: normalised values of the critic before the first step."""
    rows = [
        row
        for row in zip(episodes, columns, values, old_values, strict=True)
        if not (spec.mask_truncated and row[0].cut_off)
    ]
    estimate = ESTIMATORS[spec.kl_estimator]
    given_rewards = [
        rewards(spec, episode, estimate(episode_columns.reference - episode_columns.old).tolist())
        for episode, episode_columns, _, _ in rows
    ]
    mean, deviation = moments(spec, given_rewards)
    advantages, targets = [], []
    for reward, (_, _, _, old) in zip(given_rewards, rows, strict=True):
        old_value = mean + deviation * old
        estimates = [
            torch.tensor(gae(spec.discount, lambda_, reward, old_value.tolist()), dtype=torch.float64)
            for lambda_ in (spec.gae_lambda, spec.value_gae_lambda)
        ]
        advantages.append(estimates[0])
        targets.append((estimates[1] + old_value - mean) / deviation)
    all_advantages = torch.cat(advantages)
    if spec.whiten:
        advantages = [
            (episode_advantages - all_advantages.mean()) / (all_advantages.std(correction=0) + EPSILON)
            for episode_advantages in advantages
        ]
    learned = [episode for episode, _, _, _ in rows]
    total = torch.zeros((), dtype=torch.float64)
    for (episode, episode_columns, value, old), advantage, target in zip(rows, advantages, targets, strict=True):
        error = (value - target) ** 2
        if spec.value_clip is not None:
            clipped = old + (value - old).clamp(-spec.value_clip, spec.value_clip)
            error = torch.maximum(error, (clipped - target) ** 2)
        loss = (
            episode_loss(spec, episode, episode_columns, advantage.tolist()) + spec.value_coefficient * error.sum() / 2
        )
        total = total + weight(spec, learned, episode) * loss
        total = total - spec.entropy_coefficient * episode_columns.entropy.sum() / len(all_advantages)
    return total
