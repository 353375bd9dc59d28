"""Frozen output head and log-probabilities in one function: two products of the head's size instead of three.

With p = softmax(W h / t) for the head W, a hidden state h and a temperature t, the gradient of a log-probability

    d log p_v / dh = W' (e_v - p) / t

does not depend on the loss. So the forward pass computes it for each pair of a row and a token, while the probabilities
of a few rows are in memory. The backward pass multiplies it by the gradient of the loss and computes no logits again.
The difference e_v - p is formed in float32 and then rounded to the dtype of the head: after the product it would cancel
where p_v is almost 1.

Liger's chunked losses compute their gradients in the forward pass too, but of a loss that is known there, and without
the entropy. cut-cross-entropy recomputes the logits in the backward pass, in kernels of its own, and leaves out small
probabilities.

Legend: U rows, P pairs of a row and a token, D hidden size, V vocabulary, R rows of a part.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from components.algorithms.policy.logits import LogitHead, identity
from components.algorithms.policy.packing import Pack
from components.algorithms.policy_gradient.losses import segment_sums
from components.models.distribution import Cut
from components.models.fused_lora import DTYPES, product


def applies(head: Any, cut: Cut) -> TypeGuard[LogitHead]:
    """Return True for a frozen linear head without a transform, and a distribution that is not truncated."""
    if not isinstance(head, LogitHead) or head.transform is not identity or type(head.linear) is not torch.nn.Linear:
        return False
    weight = head.linear.weight
    return cut.whole and not weight.requires_grad and not isinstance(weight, DTensor) and weight.dtype in DTYPES


def logprobs(
    hidden_UD: torch.Tensor, head: LogitHead, pack: Pack, temperature: float, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (P,) log-probabilities of the pack's pairs and the (U,) entropies in nats, without gradient. rows:
    number of rows whose logits are in memory at a time."""
    trained = torch.is_grad_enabled() and hidden_UD.requires_grad
    values: tuple[torch.Tensor, torch.Tensor] = _HeadLogprobs.apply(
        hidden_UD, head.linear.weight, head.linear.bias, pack, temperature, rows, trained
    )
    return values


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_UD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        pack: Pack,
        temperature: float,
        rows: int,
        trained: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, slopes = [], [], []
        for first in range(0, len(hidden_UD), rows):
            last = min(first + rows, len(hidden_UD))
            pairs = slice(pack.pairs_before[first], pack.pairs_before[last])
            row_P, token_P = pack.row_P[pairs] - first, pack.token_P[pairs]
            logits_RV = linear(hidden_UD[first:last], weight_VD, bias_V).float()
            logps_RV = torch.log_softmax(logits_RV.div_(temperature), -1)
            del logits_RV
            probs_RV = logps_RV.exp()
            logprobs.append(logps_RV[row_P, token_P])
            entropies.append(-(probs_RV * logps_RV).sum(-1))
            if trained:
                probs_PV = probs_RV if len(row_P) == last - first else probs_RV[row_P]
                probs_PV[torch.arange(len(token_P), device=token_P.device), token_P] -= 1
                slopes.append(product(probs_PV.to(weight_VD.dtype), weight_VD, torch.float32))
        if trained:
            ctx.save_for_backward(torch.cat(slopes), pack.row_P)
            ctx.temperature, ctx.shape, ctx.dtype = temperature, hidden_UD.shape, hidden_UD.dtype
        entropy_U = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_U)
        return torch.cat(logprobs), entropy_U

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slope_PD, row_P = ctx.saved_tensors
        grad_PD = slope_PD * (grads[0] / -ctx.temperature)[:, None]
        if len(row_P) > ctx.shape[0]:
            pairs_U = torch.zeros(ctx.shape[0], dtype=torch.long, device=row_P.device)
            grad_PD = segment_sums(grad_PD, pairs_U.scatter_add_(0, row_P, torch.ones_like(row_P)))
        return grad_PD.to(ctx.dtype), None, None, None, None, None, None
