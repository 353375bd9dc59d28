"""Losses, as pure functions of tensors. S counts sampled tokens; every array has one entry for each.

Left out on purpose: sums and means over the batch. A loss is returned by token; the trainer weighs and adds, so that
a batch can be computed in parts with the same result.
"""

from __future__ import annotations

from typing import Literal

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut to this many nats before they are exponentiated: past 88 float32 overflows, and where the clip
takes the gradient away, 0 · inf is NaN. Beyond the limit a token has no gradient."""

KL_LIMIT = 5.0
"""Nats that one token adds to a mean that a guard looks at, at most: the estimate grows with exp of the log-ratio, so
that one outlier among thousands of tokens would end a training that is sound."""

RatioLevel = Literal["token", "sequence_mean", "sequence"]
Estimator = Literal["k1", "k2", "k3"]


def log_ratio(logprob_S: torch.Tensor, old_logprob_S: torch.Tensor) -> torch.Tensor:
    """log(pi(token) / pi_old(token)). Where the old log-probability is missing (NaN) or impossible (infinite), 0 and
    the token is treated as on-policy: its gradient stays finite."""
    known = torch.isfinite(old_logprob_S)
    return logprob_S - torch.where(known, old_logprob_S, logprob_S.detach())


def by_sequence(log_ratio_S: torch.Tensor, sequence_S: torch.Tensor, level: RatioLevel) -> torch.Tensor:
    """Return the log-ratios at the level at which they are compared: of each `token` (PPO); of the whole `sequence`,
    the sum over its tokens (RLOO); or `sequence_mean`, the mean over them (GSPO, arXiv:2507.18071, eq. 7). sequence_S:
    the index of the sequence that a token belongs to, in order."""
    if level == "token":
        return log_ratio_S
    tokens_Q = sequence_S.bincount()
    sum_Q = segment_sums(log_ratio_S, tokens_Q)
    if level == "sequence_mean":
        sum_Q = sum_Q / tokens_Q.clamp(min=1)
    return sum_Q[sequence_S]


def sequence_log_ratio(
    log_ratio_S: torch.Tensor, sequence_S: torch.Tensor, episode_tokens_S: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """Return `by_sequence`, differentiated through each token's own log-probability alone, as GSPO-token does
    (arXiv:2507.18071, section 4.3): sg(s) · π / sg(π), with s the ratio of the sequence and sg the stop-gradient.

    Differentiated as it stands, the ratio of a sequence gives each of its tokens the mean of the sequence's advantages;
    here each token keeps its own. Where a sequence has one advantage, both gradients are equal.

    A product over tokens (`sequence`) has the sum of their gradients where a mean has their mean, so its tokens count
    `episode_tokens_S` times: the sampled tokens of the whole episode, so that the weight of an episode does not depend
    on how many histories it has.
    """
    if level == "token":
        return log_ratio_S
    gradient_S = log_ratio_S - log_ratio_S.detach()
    if level == "sequence":
        gradient_S = gradient_S * episode_tokens_S
    return by_sequence(log_ratio_S.detach(), sequence_S, level) + gradient_S


def segment_sums(value_S: torch.Tensor, size_Q: torch.Tensor) -> torch.Tensor:
    """(Q, ...) sums of the first size_Q[0] rows, of the size_Q[1] after them, and so on; 0 of none. Unlike index_add it
    adds in the same order every time, on a GPU too."""
    return torch.segment_reduce(value_S, "sum", lengths=size_Q, unsafe=True)


def ratio(log_ratio_S: torch.Tensor) -> torch.Tensor:
    """exp, cut at `LOG_RATIO_LIMIT`."""
    return torch.exp(log_ratio_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def clipped_policy_loss(
    ratio_S: torch.Tensor,
    advantage_S: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), negated: -min(r A, clip(r, 1 - low, 1 + high) A). dual_clip c:
    where A < 0, the loss is at most -c A (arXiv:1912.09729, eq. 5)."""
    clipped_S = ratio_S.clamp(1 - clip_low, 1 + clip_high)
    loss_S = -torch.minimum(ratio_S * advantage_S, clipped_S * advantage_S)
    if dual_clip is None:
        return loss_S
    return torch.where(advantage_S < 0, torch.minimum(loss_S, -dual_clip * advantage_S), loss_S)


def clipped_value_loss(
    value_S: torch.Tensor, before_S: torch.Tensor, return_S: torch.Tensor, clip: float | None
) -> torch.Tensor:
    """Half the squared error of a value, or of that value moved no further than `clip` from the one before the first
    step, whichever is larger: 1/2 max((V - R)², (clip(V, V_old - c, V_old + c) - R)²) (the code of arXiv:1909.08593). A
    value that has moved that far towards its target has no gradient."""
    loss_S = (value_S - return_S).square()
    if clip is not None:
        near_S = value_S.clamp(before_S - clip, before_S + clip)
        loss_S = torch.maximum(loss_S, (near_S - return_S).square())
    return loss_S / 2


def value_clipped(
    value_S: torch.Tensor, before_S: torch.Tensor, return_S: torch.Tensor, clip: float | None
) -> torch.Tensor:
    """True where the clip took the gradient of the value away."""
    if clip is None:
        return torch.zeros_like(value_S, dtype=torch.bool)
    near_S = value_S.clamp(before_S - clip, before_S + clip)
    return (near_S - return_S).square() > (value_S - return_S).square()


def cispo_loss(
    ratio_S: torch.Tensor, logprob_S: torch.Tensor, advantage_S: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """CISPO (arXiv:2506.13585, eq. 4), negated: -sg(clip(r, 1 - low, 1 + high)) A log pi. The weight is clipped, not
    the gradient: every token keeps one."""
    return -ratio_S.clamp(1 - clip_low, 1 + clip_high).detach() * advantage_S * logprob_S


def clipped(ratio_S: torch.Tensor, advantage_S: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """True where the clip took the gradient away."""
    return ((ratio_S > 1 + clip_high) & (advantage_S > 0)) | ((ratio_S < 1 - clip_low) & (advantage_S < 0))


def correction(log_ratio_S: torch.Tensor, limit: float, how: Literal["truncate", "mask"]) -> torch.Tensor:
    """Weights for tokens that another engine sampled, from the log-ratio of trainer to sampler: min(r, limit)
    (truncated importance sampling), or r where 1 / limit <= r <= limit and 0 elsewhere. Without gradient."""
    ratio_S = ratio(log_ratio_S.detach())
    if how == "truncate":
        return ratio_S.clamp(max=limit)
    return torch.where((ratio_S >= 1 / limit) & (ratio_S <= limit), ratio_S, 0.0)


def kl_to_old(logprob_S: torch.Tensor, old_logprob_S: torch.Tensor) -> torch.Tensor:
    """Return estimates of KL(policy before || policy) on the sampled tokens: r - 1 - log r, with the ratio r of the
    policy to the one before (k3), at most `KL_LIMIT` each; 0 where the old log-probability is not known."""
    log_ratio_S = log_ratio(logprob_S, old_logprob_S)
    return (ratio(log_ratio_S) - 1 - log_ratio_S).clamp(max=KL_LIMIT)


def kl(logprob_S: torch.Tensor, reference_S: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Estimates of KL(policy || reference) on tokens that the policy sampled (Schulman, "Approximating KL divergence",
    2020), with d = log(reference / policy): k1 = -d, unbiased; k2 = d² / 2, its gradient is that of the KL; k3 =
    exp(d) - d - 1, unbiased and never negative (arXiv:2402.03300, eq. 4)."""
    difference_S = (reference_S - logprob_S).clamp(max=LOG_RATIO_LIMIT)
    if estimator == "k1":
        return -difference_S
    if estimator == "k2":
        return difference_S.square() / 2
    return torch.exp(difference_S) - difference_S - 1
