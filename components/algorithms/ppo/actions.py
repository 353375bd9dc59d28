"""Training data of PPO: the sampled tokens of a round's episodes, with rewards, advantages and returns.

Decoupled GAE (VC-PPO, arXiv:2503.01491; VAPO, arXiv:2504.05118, section 4.1): the policy's advantages and the critic's
targets are estimated with separate λ,

    A = gae(r, V_old; gae_lambda)         R = gae(r, V_old; value_gae_lambda) + V_old

with V_old the denormalised values before the first gradient step (`critic.ReturnStatistics`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from components.algorithms.policy.reference_logprobs import ReferenceLogprobs
from components.algorithms.policy_gradient import advantages, returns
from components.algorithms.policy_gradient.gradient_steps import Group
from components.algorithms.policy_gradient.training_data import Learning
from components.algorithms.ppo.critic import ReturnStatistics
from components.algorithms.ppo.gae import gae
from components.trajectories.groups import by_scenario
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.ppo.spec import PPOSpec

Columns = list[list[float]]
"""One number per action, by episode."""


@dataclass(frozen=True)
class Measurements:
    """Measurements on the actions of a round's episodes before the policy's first gradient step."""

    before: ReferenceLogprobs
    rewards: Columns
    values: Columns
    """Normalised values of the critic."""
    kl: Columns
    """Estimates of the KL divergence of the policy from the reference."""
    statistics: ReturnStatistics
    """Statistics that normalise the values."""


class Actions(Learning):
    """The A sampled tokens of a round's episodes, with one number per token in each column. Packs carry the number of
    each token."""

    def __init__(self, spec: PPOSpec, episodes: Sequence[Trajectory], measured: Measurements, *, padded: bool = False):
        super().__init__(spec, measured.before, padded=padded)
        statistics, values = measured.statistics, measured.values
        self.groups: list[Group] = list(by_scenario(episodes).values())
        denormalised = [statistics.denormalised(column) for column in values]
        policy_advantages, critic_advantages = (
            [gae(*columns, spec.discount, lambda_) for columns in zip(measured.rewards, denormalised, strict=True)]
            for lambda_ in (spec.gae_lambda, spec.value_gae_lambda)
        )
        if spec.whiten:
            policy_advantages = advantages.advantages([policy_advantages], baseline="batch", scale="batch")[0]
        self.advantages = {episode.id: column for episode, column in zip(episodes, policy_advantages, strict=True)}
        self.value_A = torch.tensor(flat(values))
        targets = [
            advantage + value for advantage, value in zip(flat(critic_advantages), flat(denormalised), strict=True)
        ]
        self.return_A = torch.tensor(statistics.normalised(targets))
        """Normalised targets of the critic."""
        self.reference_A = torch.tensor(flat([measured.before.whole("reference", episode) for episode in episodes]))
        self.kl = fmean(flat(measured.kl)) if episodes else 0.0
        """Mean KL divergence, nats per token."""
        ends = accumulate(len(column) for column in values)
        self.first = {
            episode.id: end - len(column) for episode, column, end in zip(episodes, values, ends, strict=True)
        }


def token_rewards(spec: PPOSpec, trajectory: Trajectory, kl: Sequence[float], coefficient: float) -> list[float]:
    """Return the (A,) rewards of the actions of an episode. kl: one estimate per action, with weight `coefficient`."""
    lengths = returns.turn_lengths(trajectory)
    if spec.credit == "turns":
        rewards = returns.turn_rewards(trajectory)
    else:
        rewards, lengths = [trajectory.reward or 0.0], [sum(lengths)]
    if spec.overlong:
        rewards[-1] += spec.overlong_penalty * returns.overlong(sum(lengths), spec.overlong, spec.overlong_buffer)
    by_token = returns.token_rewards(rewards, lengths)
    return [reward - coefficient * token_kl for reward, token_kl in zip(by_token, kl, strict=True)]


def flat(columns: Columns) -> list[float]:
    """Return the numbers of all episodes in one list."""
    return [value for column in columns for value in column]
