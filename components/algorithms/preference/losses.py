"""Preference losses, as pure functions of the log-probabilities of whole episodes under a policy and its reference.

P counts pairs, E episodes. Log-probabilities are sums over the sampled tokens of an episode; tokens of system, user and
tools are excluded.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid


def dpo(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    chosen_reference_P: torch.Tensor,
    rejected_reference_P: torch.Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the (P,) DPO losses -log sigma(beta h), with the margin h = (chosen - its reference) - (rejected - its
    reference) (arXiv:2305.18290, eq. 7). label_smoothing e: assumed share of preferences with swapped labels
    (arXiv:2305.18290, conservative DPO): (1 - e) times the loss of h plus e times the loss of -h."""
    margin_P = (chosen_P - chosen_reference_P) - (rejected_P - rejected_reference_P)
    return -(1 - label_smoothing) * logsigmoid(beta * margin_P) - label_smoothing * logsigmoid(-beta * margin_P)


def ipo(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    chosen_reference_P: torch.Tensor,
    rejected_reference_P: torch.Tensor,
    chosen_tokens_P: torch.Tensor,
    rejected_tokens_P: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """Return the (P,) IPO losses (h - 1 / (2 beta))², with the margin h per token: each side divided by its number of
    tokens (arXiv:2310.12036, eq. 17; per token as in its authors' experiments)."""
    better_P = (chosen_P - chosen_reference_P) / chosen_tokens_P
    worse_P = (rejected_P - rejected_reference_P) / rejected_tokens_P
    return (better_P - worse_P - 1 / (2 * beta)).square()


def orpo(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    chosen_tokens_P: torch.Tensor,
    rejected_tokens_P: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """Return the (P,) ORPO losses -beta log sigma(log odds ratio of chosen over rejected), with odds p / (1 - p) of the
    geometric mean p over an episode's tokens (arXiv:2403.07691, eq. 7). The trainer adds the likelihood of the chosen
    episode."""
    better_P, worse_P = chosen_P / chosen_tokens_P, rejected_P / rejected_tokens_P
    odds_P = (better_P - worse_P) - (_log1mexp(better_P) - _log1mexp(worse_P))
    return -beta * logsigmoid(odds_P)


def likelihood(logprob_E: torch.Tensor, tokens_E: torch.Tensor) -> torch.Tensor:
    """Return the (E,) negative log-likelihoods per token of chosen episodes, which RPO adds to the DPO loss
    (arXiv:2404.19733, eq. 1)."""
    return -logprob_E / tokens_E


def kto(
    logprob_E: torch.Tensor, reference_E: torch.Tensor, good_E: torch.Tensor, kl: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return the (E,) KTO losses 1 - sigma(beta (log-ratio - kl)) for good episodes, 1 - sigma(beta (kl - log-ratio))
    for bad ones (arXiv:2402.01306, eq. 8). kl is clamped to at least 0 and carries no gradient."""
    difference_E = (logprob_E - reference_E) - kl.detach().clamp(min=0)
    return 1 - torch.sigmoid(beta * torch.where(good_E, difference_E, -difference_E))


def _log1mexp(value: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(value)) for values below 0, accurate both near 0 and far from it (Mächler, 2012)."""
    value = value.clamp(max=-1e-7)
    near = value > -0.6931471805599453
    return torch.where(near, torch.log(-torch.expm1(value)), torch.log1p(-torch.exp(value)))
