"""Drawing tokens from logits, row by row repeatable.

A token is the inverse of the cumulative distribution at one uniform number, so a row's draw depends on its own
number only, never on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from components.inference.protocol import Sampling
from components.models.distribution import Cut, kept


def draw(
    logits_BV: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Returns one token and its log-probability for each row.

    The log-probability is under the distribution that was drawn from: after temperature, top-k and top-p. Greedy
    rows (temperature 0) carry it at temperature 1. A row without a distribution, because its logits are not finite, has
    a log-probability of NaN and a token that means nothing; the other rows are what they would be without it.
    """
    greedy = torch.tensor([sampling.temperature == 0 for sampling in samplings])
    temperature_B = torch.tensor([sampling.temperature or 1.0 for sampling in samplings])
    logps_BV = torch.log_softmax(logits_BV / temperature_B[:, None].to(logits_BV), dim=-1)
    for row, sampling in enumerate(samplings):
        cut = Cut(sampling.temperature or 1.0, sampling.top_p, sampling.top_k, sampling.min_p)
        if sampling.temperature and not cut.whole:
            logps_BV[row] = truncate(logps_BV[row], cut)
    if greedy.all():
        tokens_B = logits_BV.argmax(-1)
    else:
        cumulative_BV = logps_BV.exp().cumsum(-1)
        points_B1 = torch.tensor(uniforms, dtype=torch.float64)[:, None].to(cumulative_BV) * cumulative_BV[:, -1:]
        tokens_B = torch.searchsorted(cumulative_BV, points_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
        # Rounding can put a point on the total: step back to a token that can be drawn.
        impossible = logps_BV.gather(-1, tokens_B[:, None])[:, 0] == -torch.inf
        tokens_B = torch.where(impossible | greedy.to(tokens_B.device), logits_BV.argmax(-1), tokens_B)
    logps_B = logps_BV.gather(-1, tokens_B[:, None])[:, 0]
    return tokens_B.tolist(), logps_B.tolist()


def truncate(logps_V: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Log-probabilities renormalised over the tokens that can be drawn (`components.models.distribution`)."""
    return logps_V.masked_fill(~kept(logps_V[None], cut)[0], -torch.inf).log_softmax(-1)
