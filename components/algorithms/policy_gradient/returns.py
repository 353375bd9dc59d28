"""Returns of an episode: one for the whole, one per role, one from each turn on, or one from each sampled token on.

    episode   the judged reward r: one number
    turns     G_t = sum over k >= t of discount^(k - t) · s_k, with the step rewards s: one number per turn
    roles     sum over the turns k of the role of s_k: one number per role
    tokens    the first or second of these, minus coefficient · sum over i >= t of KL_i: one number per sampled token

The last form is a KL penalty in the token rewards (REINFORCE++, arXiv:2501.03262, eq. 5). Subtracted from an episode's
reward as a whole, the penalty keeps one number per episode (RLOO, arXiv:2402.14740). `overlong` adds a penalty for long
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from components.errors import ArtifactError
from components.trajectories.roles import by_role
from components.trajectories.schema import Trajectory


def turn_lengths(trajectory: Trajectory) -> list[int]:
    """Return the number of sampled tokens of each sampled message, over all histories; 0 for a message that is never
    trained on."""
    return [
        sum(mask[slice(*message.span)])
        for history in trajectory.histories
        for mask in [history.sampled_mask()]
        for message in history.messages
        if message.span is not None
    ]


def turn_rewards(trajectory: Trajectory) -> list[float]:
    """Return the step reward of each turn. Raises ArtifactError if the numbers of step rewards and turns differ."""
    turns = len(turn_lengths(trajectory))
    rewards = trajectory.step_rewards
    if len(rewards) != turns:
        raise ArtifactError(
            f"trajectory {trajectory.id} has {len(rewards)} step rewards for {turns} turns: algorithm.credit=turns and "
            "roles need one for each turn. Set algorithm.credit=episode, or use a reward or environment that sets step "
            "rewards"
        )
    return list(rewards)


def role_rewards(trajectory: Trajectory) -> dict[str, float]:
    """Return the sum of the step rewards of each role. Raises ArtifactError as `turn_rewards`."""
    return {role: sum(rewards) for role, rewards in by_role(trajectory, turn_rewards(trajectory)).items()}


def discounted_sums(values: Sequence[float], discount: float) -> list[float]:
    """Return, for each index t, the sum over k >= t of discount^(k - t) · values[k]."""
    return list(accumulate(reversed(values), lambda future, value: value + discount * future))[::-1]


def subtract_kl(
    returns: Sequence[float], lengths: Sequence[int], kl: Sequence[float], coefficient: float
) -> list[float]:
    """Return token returns from turn returns (or from one episode return, with one length), each minus the weighted KL
    divergence of its own and all later tokens. kl: one per sampled token."""
    token_returns = [value for value, length in zip(returns, lengths, strict=True) for _ in range(length)]
    remaining_kl = list(accumulate(reversed(kl)))[::-1]
    return [value - coefficient * remaining for value, remaining in zip(token_returns, remaining_kl, strict=True)]


def token_rewards(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return token rewards from turn rewards (or from one episode reward, with one length): each at the last token of
    its turn. The reward of a turn without tokens goes to the token before it."""
    by_token = [0.0] * sum(lengths)
    for reward, end in zip(rewards, accumulate(lengths), strict=True):
        if by_token:
            by_token[max(end - 1, 0)] += reward
    return by_token


def overlong(tokens: int, longest: int, buffer: int) -> float:
    """Return the soft length penalty, from 0 to -1 (DAPO, arXiv:2503.14476, eq. 13): 0 up to longest - buffer tokens,
    falling linearly to -1 at `longest`."""
    if tokens <= longest - buffer:
        return 0.0
    return max(-1.0, (longest - buffer - tokens) / buffer) if buffer else -1.0
