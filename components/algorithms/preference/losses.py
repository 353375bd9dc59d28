"""Preference losses, as pure functions of what a policy and its reference say of whole episodes.

P counts pairs, E episodes. Log-probabilities are sums over the sampled tokens of an episode; tokens of system, user and
tools are in none of them.
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
    """(P,) -log sigma(beta h), with the margin h = (chosen - its reference) - (rejected - its reference)
    (arXiv:2305.18290, eq. 7). label_smoothing e: that share of the preferences is taken to be the wrong way round
    (arXiv:2305.18290, conservative DPO): (1 - e) times that loss plus e times that of -h."""
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
    """(P,) (h - 1 / (2 beta))² with the margin by token, each side divided by its number of tokens (arXiv:2310.12036,
    eq. 17; by token as its authors computed it)."""
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
    """(P,) -beta log sigma(log odds of the chosen over the rejected), with odds p / (1 - p) of the geometric mean p
    over an episode's tokens (arXiv:2403.07691, eq. 7). The likelihood of the chosen is added by the trainer."""
    better_P, worse_P = chosen_P / chosen_tokens_P, rejected_P / rejected_tokens_P
    odds_P = (better_P - worse_P) - (_log1mexp(better_P) - _log1mexp(worse_P))
    return -beta * logsigmoid(odds_P)


def kto(
    logprob_E: torch.Tensor, reference_E: torch.Tensor, good_E: torch.Tensor, kl: torch.Tensor, beta: float
) -> torch.Tensor:
    """(E,) 1 - sigma(beta (log-ratio - kl)) for good episodes, 1 - sigma(beta (kl - log-ratio)) for bad ones
    (arXiv:2402.01306, eq. 8). kl: not below 0, without gradient."""
    difference_E = (logprob_E - reference_E) - kl.detach().clamp(min=0)
    return 1 - torch.sigmoid(beta * torch.where(good_E, difference_E, -difference_E))


def _log1mexp(value: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(value)) for values below 0, exact near 0 as well as far from it (Mächler, 2012)."""
    value = value.clamp(max=-1e-7)
    near = value > -0.6931471805599453
    return torch.where(near, torch.log(-torch.expm1(value)), torch.log1p(-torch.exp(value)))
