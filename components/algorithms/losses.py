"""Losses, as pure functions of tensors. S counts sampled tokens; every array has one entry for each.

Left out on purpose: sums and means over the batch. A loss is returned by token; the trainer weighs and adds, so that
a batch can be computed in parts with the same result.
"""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut to this many nats before they are exponentiated: past 88 float32 overflows, and where the clip
takes the gradient away, 0 · inf is NaN. Beyond the limit a token has no gradient."""


def policy_ratio(logprob_S: torch.Tensor, old_logprob_S: torch.Tensor) -> torch.Tensor:
    """pi(token) / pi_old(token). Where the old log-probability is missing (NaN) or impossible (infinite), the ratio is
    1 and the token is treated as on-policy: its gradient stays finite."""
    known = torch.isfinite(old_logprob_S)
    old = torch.where(known, old_logprob_S, logprob_S.detach())
    return torch.exp((logprob_S - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def clipped_policy_loss(
    ratio_S: torch.Tensor, advantage_S: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), negated: -min(r A, clip(r, 1 - low, 1 + high) A)."""
    clipped_S = ratio_S.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_S * advantage_S, clipped_S * advantage_S)


def clipped(ratio_S: torch.Tensor, advantage_S: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """True where the clip took the gradient away."""
    return ((ratio_S > 1 + clip_high) & (advantage_S > 0)) | ((ratio_S < 1 - clip_low) & (advantage_S < 0))


def kl_k3(logprob_S: torch.Tensor, reference_S: torch.Tensor) -> torch.Tensor:
    """Unbiased, non-negative estimate of KL(policy || reference) on tokens that the policy sampled: exp(d) - d - 1 with
    d = log(reference / policy) (Schulman, "Approximating KL divergence", 2020; arXiv:2402.03300, eq. 4)."""
    difference_S = (reference_S - logprob_S).clamp(max=LOG_RATIO_LIMIT)
    return torch.exp(difference_S) - difference_S - 1
