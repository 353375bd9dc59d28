"""Returns: what an episode is worth, as a whole, from each of its turns on, or from each of its tokens on.

    episode   the judged reward r, one number
    turns     G_t = sum over k >= t of discount^(k - t) · s_k, with the step rewards s: one number for each turn
    tokens    either of them, minus coefficient · sum over i >= t of KL_i: one number for each sampled token

The last one is a KL to the reference as part of the reward, by token (REINFORCE++, arXiv:2501.03262, eq. 5); taken off
an episode's reward as a whole it stays one number (RLOO, arXiv:2402.14740). Long answers may cost (`overlong`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from components.errors import ArtifactError
from components.trajectories.schema import Trajectory


def turn_lengths(trajectory: Trajectory) -> list[int]:
    """Sampled tokens of each sampled message, over all histories."""
    spans = [message.span for history in trajectory.histories for message in history.messages]
    return [end - start for start, end in (span for span in spans if span is not None)]


def turn_rewards(trajectory: Trajectory) -> list[float]:
    """Step reward of each turn. Raises ArtifactError where there is not one for each."""
    turns = len(turn_lengths(trajectory))
    rewards = trajectory.step_rewards
    if len(rewards) != turns:
        raise ArtifactError(
            f"trajectory {trajectory.id} has {len(rewards)} step rewards for {turns} turns: algorithm.credit=turns "
            "needs one for each. Take algorithm.credit=episode, or a reward or environment that gives them"
        )
    return list(rewards)


def discounted_sums(values: Sequence[float], discount: float) -> list[float]:
    """Return for each index t the sum over k >= t of discount^(k - t) · values[k]."""
    return list(accumulate(reversed(values), lambda later, value: value + discount * later))[::-1]


def penalised(returns: Sequence[float], lengths: Sequence[int], kl: Sequence[float], coefficient: float) -> list[float]:
    """Returns by turn (or one for the episode, with one length) to returns by token, each less the KL that is still to
    come. kl: of each sampled token."""
    by_token = [value for value, length in zip(returns, lengths, strict=True) for _ in range(length)]
    to_come = list(accumulate(reversed(kl)))[::-1]
    return [value - coefficient * later for value, later in zip(by_token, to_come, strict=True)]


def token_rewards(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Rewards by turn (or one for the episode, with one length) to rewards by token: each at the last token of its own.
    That of a turn without tokens falls to the token before it."""
    by_token = [0.0] * sum(lengths)
    for reward, end in zip(rewards, accumulate(lengths), strict=True):
        if by_token:
            by_token[max(end - 1, 0)] += reward
    return by_token


def overlong(tokens: int, longest: int, buffer: int) -> float:
    """Soft punishment of long answers, from 0 to -1 (DAPO, arXiv:2503.14476, eq. 13): 0 up to longest - buffer tokens,
    falling linearly to -1 at `longest`."""
    if tokens <= longest - buffer:
        return 0.0
    return max(-1.0, (longest - buffer - tokens) / buffer) if buffer else -1.0
