"""LoRA layers with few kernels, for training on a GPU.

PEFT computes `W x + (alpha / r) · B A x` (arXiv:2106.09685, section 3) with the adapter in float32 and the base in
bfloat16: inputs and outputs are converted, and each sum and product is a kernel of its own, about 34 per layer, forward
and backward. Here they are 15: A and B are rounded to the dtype of the base, as an engine does that serves them, the
update is added by the matrix product itself, and gradients of A and B are sums in float32.

Layers that compute more than this (dropout, merged or several adapters, variants of LoRA, a quantized base, a base in
float16, whose range small values of B leave) keep PEFT's forward pass, as do all layers on a CPU.

Legend: N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear

DTYPES = (torch.float32, torch.bfloat16)


def fuse(model: Any) -> int:
    """Give the LoRA layers of a PEFT model the fused forward pass, and return their number."""
    from peft.tuners.lora.layer import Linear

    layers = [
        module
        for module in model.modules()
        if type(module) is Linear
        and type(module.base_layer) is torch.nn.Linear
        and module.base_layer.weight.dtype in DTYPES
    ]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    names = layer.active_adapters
    if args or kwargs or len(names) != 1 or not _is_plain(layer, names[0]):
        result: torch.Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return result
    name, base = names[0], layer.base_layer
    weights = base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight
    out: torch.Tensor = _Lora.apply(x, *weights, layer.scaling[name])
    return out


def _is_plain(layer: Any, name: str) -> bool:
    """Return True if the layer's output is `W x + b + scale · B A x` now."""
    dropout = layer.lora_dropout[name] if name in layer.lora_A else None
    return not (
        dropout is None
        or layer.disable_adapters
        or layer.merged
        or name in layer.lora_variant
        or layer.base_layer.weight.requires_grad
        or (dropout.training and not isinstance(dropout, torch.nn.Identity))
    )


class _Lora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        ctx.dtypes = a_RI.dtype, b_OR.dtype
        a_RI, b_OR = a_RI.to(x.dtype), b_OR.to(x.dtype)
        ax_NR = x_NI @ a_RI.T
        out_NO = linear(x_NI, weight_OI, bias_O).addmm_(ax_NR, b_OR.T, alpha=scale)
        ctx.save_for_backward(x_NI, weight_OI, a_RI, b_OR, ax_NR)
        ctx.scale = scale
        return out_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NI, weight_OI, a_RI, b_OR, ax_NR = ctx.saved_tensors
        out_NO = grads[0].reshape(-1, grads[0].shape[-1])
        ax_grad_NR = (out_NO @ b_OR).mul_(ctx.scale)
        x_grad = a_grad_RI = b_grad_OR = None
        if ctx.needs_input_grad[0]:
            x_grad = (out_NO @ weight_OI).addmm_(ax_grad_NR, a_RI).view(*grads[0].shape[:-1], -1)
        if ctx.needs_input_grad[3]:
            a_grad_RI = product(ax_grad_NR.T, x_NI, ctx.dtypes[0])
        if ctx.needs_input_grad[4]:
            b_grad_OR = product(out_NO.T, ax_NR, ctx.dtypes[1]).mul_(ctx.scale)
        return x_grad, None, None, a_grad_RI, b_grad_OR, None


def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix product in `dtype`, on a GPU without rounding to the dtype of the factors in between."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
