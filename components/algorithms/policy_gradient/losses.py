"""Losses, as pure functions of tensors. S counts sampled tokens; every array has one entry per sampled token.

Sums and means over the batch are left out on purpose: losses are returned per token, and the trainer weighs and sums
them, so that a batch can be computed in parts with the same result.
"""

from __future__ import annotations

from typing import Literal

import torch

LOG_RATIO_LIMIT = 20.0
"""Limit of log-ratios (nats) before exponentiation: float32 overflows above 88, and where the clip removes the
gradient, 0 · inf is NaN. Beyond the limit a token has no gradient."""

KL_LIMIT = 5.0
"""Largest contribution (nats) of the exponential of one token's log-ratio to a KL divergence: at a log-ratio of 24, the
estimate would be 4.9e8, so one outlier among thousands of tokens would stop a sound training, or be all of a loss."""

RatioLevel = Literal["token", "sequence_mean", "sequence"]
Estimator = Literal["k1", "k2", "k3"]


def log_ratio(logprob_S: torch.Tensor, old_logprob_S: torch.Tensor) -> torch.Tensor:
    """Return log(pi(token) / pi_old(token)). If the old log-probability is missing (NaN) or infinite, the log-ratio is
    0 and the token is treated as on-policy, so that its gradient stays finite."""
    finite_S = torch.isfinite(old_logprob_S)
    return logprob_S - torch.where(finite_S, old_logprob_S, logprob_S.detach())


def by_sequence(log_ratio_S: torch.Tensor, sequence_S: torch.Tensor, level: RatioLevel) -> torch.Tensor:
    """Return the log-ratios at the level `level`: per `token` (PPO); per `sequence`, the sum over its tokens (RLOO); or
    `sequence_mean`, the mean over its tokens (GSPO, arXiv:2507.18071, eq. 7). sequence_S: index of the sequence that
    each token belongs to, in ascending order."""
    if level == "token":
        return log_ratio_S
    # There are at most as many sequences as tokens; their number, which bincount needs, would be a wait for the device.
    tokens_Q = torch.zeros_like(sequence_S).scatter_add_(0, sequence_S, torch.ones_like(sequence_S))
    sum_Q = segment_sums(log_ratio_S, tokens_Q)
    if level == "sequence_mean":
        sum_Q = sum_Q / tokens_Q.clamp(min=1)
    return sum_Q[sequence_S]


def sequence_log_ratio(
    log_ratio_S: torch.Tensor, sequence_S: torch.Tensor, episode_tokens_S: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """Return `by_sequence`, differentiated only through each token's own log-probability, as in GSPO-token
    (arXiv:2507.18071, section 4.3): sg(s) · π / sg(π), with s the ratio of the sequence and sg the stop-gradient.

    The plain gradient of a sequence ratio gives each token the mean of the sequence's advantages; here each token keeps
    its own advantage. If all tokens of a sequence have the same advantage, both gradients are equal.

    The gradient of a product over tokens (`sequence`) is the sum of the token gradients, that of `sequence_mean` their
    mean. So with `sequence` each token counts `episode_tokens_S` times: the number of sampled tokens of the whole
    episode. The weight of an episode then does not depend on its number of histories.
    """
    if level == "token":
        return log_ratio_S
    gradient_S = log_ratio_S - log_ratio_S.detach()
    if level == "sequence":
        gradient_S = gradient_S * episode_tokens_S
    return by_sequence(log_ratio_S.detach(), sequence_S, level) + gradient_S


def segment_sums(value_S: torch.Tensor, size_Q: torch.Tensor) -> torch.Tensor:
    """Return the (Q, ...) sums of the first size_Q[0] rows, of the next size_Q[1] rows, and so on; an empty segment
    sums to 0. Unlike index_add, the order of additions is deterministic, on a GPU too."""
    return torch.segment_reduce(value_S, "sum", lengths=size_Q, unsafe=True)


def ratio(log_ratio_S: torch.Tensor) -> torch.Tensor:
    """Return exp of the log-ratios, clamped to ±`LOG_RATIO_LIMIT`."""
    return torch.exp(log_ratio_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def clipped_policy_loss(
    ratio_S: torch.Tensor,
    advantage_S: torch.Tensor,
    clip_low: float | torch.Tensor,
    clip_high: float | torch.Tensor,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """Return the negated clipped surrogate of PPO (arXiv:1707.06347, eq. 7): -min(r A, clip(r, 1 - low, 1 + high) A).
    dual_clip c: where A < 0, the loss is at most -c A (arXiv:1912.09729, eq. 5)."""
    clipped_S = ratio_S.clamp(1 - clip_low, 1 + clip_high)
    loss_S = -torch.minimum(ratio_S * advantage_S, clipped_S * advantage_S)
    if dual_clip is None:
        return loss_S
    return torch.where(advantage_S < 0, torch.minimum(loss_S, -dual_clip * advantage_S), loss_S)


def clipped_value_loss(
    value_S: torch.Tensor, before_S: torch.Tensor, return_S: torch.Tensor, clip: float | None
) -> torch.Tensor:
    """Return half the squared error of a value, or of the value clipped to within `clip` of the value before the first
    step, whichever is larger: 1/2 max((V - R)², (clip(V, V_old - c, V_old + c) - R)²) (as in the code of
    arXiv:1909.08593). A value that has moved by more than `clip` towards its target has no gradient."""
    loss_S = (value_S - return_S).square()
    if clip is not None:
        clipped_S = value_S.clamp(before_S - clip, before_S + clip)
        loss_S = torch.maximum(loss_S, (clipped_S - return_S).square())
    return loss_S / 2


def value_clipped(
    value_S: torch.Tensor, before_S: torch.Tensor, return_S: torch.Tensor, clip: float | None
) -> torch.Tensor:
    """Return True where the clip removes the gradient of the value."""
    if clip is None:
        return torch.zeros_like(value_S, dtype=torch.bool)
    clipped_S = value_S.clamp(before_S - clip, before_S + clip)
    return (clipped_S - return_S).square() > (value_S - return_S).square()


def cispo_loss(
    ratio_S: torch.Tensor,
    logprob_S: torch.Tensor,
    advantage_S: torch.Tensor,
    clip_low: float | torch.Tensor,
    clip_high: float | torch.Tensor,
) -> torch.Tensor:
    """Return the negated CISPO objective (arXiv:2506.13585, eq. 4): -sg(clip(r, 1 - low, 1 + high)) A log pi. The
    weight is clipped, not the gradient: every token keeps a gradient."""
    return -ratio_S.clamp(1 - clip_low, 1 + clip_high).detach() * advantage_S * logprob_S


def clipped(ratio_S: torch.Tensor, advantage_S: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """Return True where the clip removes the gradient."""
    return ((ratio_S > 1 + clip_high) & (advantage_S > 0)) | ((ratio_S < 1 - clip_low) & (advantage_S < 0))


def correction(log_ratio_S: torch.Tensor, limit: float, method: Literal["truncate", "mask"]) -> torch.Tensor:
    """Return weights for tokens that another engine sampled, from the log-ratio of trainer to sampler: min(r, limit)
    (truncated importance sampling), or r if 1 / limit <= r <= limit and 0 elsewhere. The weights carry no gradient."""
    ratio_S = ratio(log_ratio_S.detach())
    if method == "truncate":
        return ratio_S.clamp(max=limit)
    return torch.where((ratio_S >= 1 / limit) & (ratio_S <= limit), ratio_S, 0.0)


def kl_to_old(logprob_S: torch.Tensor, old_logprob_S: torch.Tensor) -> torch.Tensor:
    """Return estimates of KL(old policy || policy) on the sampled tokens: r - 1 - log r, with r the ratio of the policy
    to the old policy (k3), at most `KL_LIMIT` each; 0 if the old log-probability is unknown."""
    log_ratio_S = log_ratio(logprob_S, old_logprob_S)
    return (ratio(log_ratio_S) - 1 - log_ratio_S).clamp(max=KL_LIMIT)


def kl(logprob_S: torch.Tensor, reference_S: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Return estimates of KL(policy || reference) on tokens that the policy sampled (Schulman, "Approximating KL
    divergence", 2020), with d = log(reference / policy): k1 = -d, unbiased; k2 = d² / 2, whose gradient is that of the
    KL divergence; k3 = exp(d) - d - 1, unbiased and never negative (arXiv:2402.03300, eq. 4). Where the exponential
    exceeds it (d > 2.1), k3 is `KL_LIMIT` and has no gradient."""
    difference_S = (reference_S - logprob_S).clamp(max=LOG_RATIO_LIMIT)
    if estimator == "k1":
        return -difference_S
    if estimator == "k2":
        return difference_S.square() / 2
    estimate_S = torch.exp(difference_S) - difference_S - 1
    return torch.where(difference_S > 0, estimate_S.clamp(max=KL_LIMIT), estimate_S)
