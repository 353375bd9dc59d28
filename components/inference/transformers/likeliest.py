"""The most likely tokens of a distribution."""

from __future__ import annotations

import torch

from components.inference.protocol import TokenLogprobs


def likeliest(logps_TV: torch.Tensor, count: int) -> list[TokenLogprobs]:
    """Return the `count` most likely tokens of each of T distributions, without tokens that cannot be sampled."""
    values_TK, ids_TK = logps_TV.topk(min(count, logps_TV.shape[-1]), dim=-1)
    return [
        [(token, logprob) for token, logprob in zip(ids, values, strict=True) if logprob > -torch.inf]
        for ids, values in zip(ids_TK.tolist(), values_TK.tolist(), strict=True)
    ]
