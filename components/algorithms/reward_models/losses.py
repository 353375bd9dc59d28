"""Losses of reward models, as pure functions of scores and labels.

P counts pairs, R readings (an episode, or one of its turns), H heads.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, margin_P: torch.Tensor | float = 0.0, centering: float = 0.0
) -> torch.Tensor:
    """Return the (P,) losses -log sigma(chosen - rejected - margin) (arXiv:2203.02155, eq. 1; margin: arXiv:2307.09288,
    eq. 2), plus centering · (chosen + rejected)², which keeps scores around 0 (arXiv:2312.09244, eq. 2)."""
    return -logsigmoid(chosen_P - rejected_P - margin_P) + centering * (chosen_P + rejected_P).square()


def mean_squared_error(score_RH: torch.Tensor, label_RH: torch.Tensor) -> torch.Tensor:
    """Return the mean of (score - label)² over the labels; NaN marks a missing label. Return 0 if all labels are
    missing."""
    has_label_RH = ~label_RH.isnan()
    error_RH = torch.where(has_label_RH, score_RH - label_RH.nan_to_num(), torch.zeros_like(score_RH))
    return error_RH.square().sum() / has_label_RH.sum().clamp(min=1)
