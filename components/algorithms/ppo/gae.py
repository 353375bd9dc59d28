"""Generalised advantage estimation (arXiv:1506.02438, eq. 16) over the actions of an episode, its sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence


def gae(rewards_A: Sequence[float], values_A: Sequence[float], discount: float, lambda_: float) -> list[float]:
    """Return the (A,) advantages of the A actions of one episode: the sum over l of (discount · lambda_)^l · delta_(t +
    l), where

        delta_t = r_t + discount · V_(t + 1) - V_t

    values_A: value of the state in which each action is taken. The value after the last action is 0.
    """
    advantages = [0.0] * len(values_A)
    next_advantage, next_value = 0.0, 0.0
    for t in reversed(range(len(values_A))):
        delta = rewards_A[t] + discount * next_value - values_A[t]
        next_advantage = advantages[t] = delta + discount * lambda_ * next_advantage
        next_value = values_A[t]
    return advantages
