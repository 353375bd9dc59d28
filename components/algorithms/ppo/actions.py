"""What PPO learns from: the sampled tokens of a round's episodes, with their rewards, advantages and returns.

Decoupled GAE (VC-PPO, arXiv:2503.01491; VAPO, arXiv:2504.05118, section 4.1): advantages of the policy and targets of
the critic are estimated with a λ each,

    A = gae(r, V_old; gae_lambda)         R = gae(r, V_old; value_gae_lambda) + V_old

with V_old the de-normalised values before the first step (`return_statistics`).
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
"""Numbers of each action, by episode."""


class Actions(Learning):
    """The A sampled tokens of a round's episodes, with columns of their own. Packs carry the number of each.

    rewards: of the actions of each episode. values: normalised values of the critic before the first step. statistics:
    by which it is normalised. kl: estimates on the actions, of the policy before the first step to the reference.
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
        known = [statistics.denormalised(each) for each in values]
        policy, critic = (
            [gae(*each, spec.discount, lambda_) for each in zip(rewards, known, strict=True)]
            for lambda_ in (spec.gae_lambda, spec.value_gae_lambda)
        )
        if spec.whiten:
            policy = advantages.advantages([policy], baseline="batch", scale="batch")[0]
        self.advantages = {one.id: each for one, each in zip(episodes, policy, strict=True)}
        self.value_A = torch.tensor(flat(values))
        targets = [a + v for a, v in zip(flat(critic), flat(known), strict=True)]
        self.return_A = torch.tensor(statistics.normalised(targets))
        """Targets of the critic, normalised."""
        self.reference_A = torch.tensor(flat([before.whole("reference", one) for one in episodes]))
        self.kl = fmean(flat(kl)) if episodes else 0.0
        """Nats a token."""
        ends = accumulate(len(each) for each in values)
        self.first = {one.id: end - len(each) for one, each, end in zip(episodes, values, ends, strict=True)}


def token_rewards(spec: PPOSpec, trajectory: Trajectory, kl: Sequence[float], coefficient: float) -> list[float]:
    """Return the (A,) reward of each action of an episode. kl: of each, with its weight `coefficient`."""
    lengths = returns.turn_lengths(trajectory)
    if spec.credit == "turns":
        given = returns.turn_rewards(trajectory)
    else:
        given, lengths = [trajectory.reward or 0.0], [sum(lengths)]
    if spec.overlong:
        given[-1] += spec.overlong_penalty * returns.overlong(sum(lengths), spec.overlong, spec.overlong_buffer)
    by_token = returns.token_rewards(given, lengths)
    return [reward - coefficient * own for reward, own in zip(by_token, kl, strict=True)]


def flat(columns: Columns) -> list[float]:
    """Return the numbers of all episodes, in one list."""
    return [value for each in columns for value in each]
