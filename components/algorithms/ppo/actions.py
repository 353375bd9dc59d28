"""Training data of PPO: the sampled tokens of a round's episodes, with rewards, advantages and returns.

Decoupled GAE (VC-PPO, arXiv:2503.01491; VAPO, arXiv:2504.05118, section 4.1): the policy's advantages and the critic's
targets are estimated with separate λ,

    A = gae(r, V_old; gae_lambda)         R = gae(r, V_old; value_gae_lambda) + V_old

with V_old the denormalised values before the first gradient step (`return_statistics`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean

import torch

from components.algorithms.policy.reference_logprobs import Before
from components.algorithms.policy_gradient import advantages, returns
from components.algorithms.policy_gradient.gradient_steps import Group
from components.algorithms.policy_gradient.training_data import Learning
from components.algorithms.ppo.gae import gae
from components.algorithms.ppo.return_statistics import ReturnStatistics
from components.algorithms.spec import PPOSpec
from components.trajectories.groups import by_scenario
from components.trajectories.schema import Trajectory

Columns = list[list[float]]
"""One number per action, by episode."""


class Actions(Learning):
    """The A sampled tokens of a round's episodes, with one number per token in each column. Packs carry the number of
    each token.

    rewards: of the actions of each episode. values: normalised values of the critic before the first gradient step.
    statistics: the statistics that normalise the values. kl: estimates on the actions of the KL divergence of the
    policy before the first gradient step from the reference.
    """

    def __init__(
        self,
        spec: PPOSpec,
        before: Before,
        episodes: Sequence[Trajectory],
        rewards: Columns,
        values: Columns,
        statistics: ReturnStatistics,
        *,
        kl: Columns,
        padded: bool = False,
    ):
        super().__init__(spec, before, padded=padded)
        self.groups: list[Group] = list(by_scenario(episodes).values())
        denormalised = [statistics.denormalised(column) for column in values]
        policy_advantages, critic_advantages = (
            [gae(*columns, spec.discount, lambda_) for columns in zip(rewards, denormalised, strict=True)]
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
        self.reference_A = torch.tensor(flat([before.whole("reference", episode) for episode in episodes]))
        self.kl = fmean(flat(kl)) if episodes else 0.0
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
