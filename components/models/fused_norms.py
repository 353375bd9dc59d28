"""RMS norms with one kernel instead of seven, forward and backward, on a GPU.

transformers computes `weight · x / sqrt(mean(x²) + eps)` (arXiv:1910.07467, equation 4) step by step. torch's
`rms_norm` computes it in one kernel, in float32, and rounds once.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch.nn.functional import rms_norm

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest relative difference of an output from that of the module's own formula: a few roundings."""


def fuse(model: Any) -> int:
    """Give the RMS norms of a model the fused forward pass, and return their number. Modules whose outputs differ from
    those of `rms_norm`, because they have another formula, stay as they are."""
    equal: dict[tuple[type, int], bool] = {}
    fused = 0
    for module in model.modules():
        if not _may_be_rms_norm(module):
            continue
        kind = type(module), len(module.weight)
        if kind not in equal:
            equal[kind] = _is_rms_norm(module)
        if equal[kind]:
            module.forward = MethodType(_forward, module)
            fused += 1
    return fused


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != module.weight.dtype:
        result: torch.Tensor = type(module).forward(module, x)
        return result
    return rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _may_be_rms_norm(module: Any) -> bool:
    names = [name for name, _ in module.named_parameters()]
    return (
        type(module).__name__.endswith("RMSNorm")
        and names == ["weight"]
        and module.weight.ndim == 1
        and module.weight.dtype in TOLERANCES
        and hasattr(module, "variance_epsilon")
    )


@torch.no_grad()
def _is_rms_norm(module: Any) -> bool:
    """Return True if the module computes what `_forward` does, for random inputs and weights."""
    weight = module.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(4, len(weight), generator=generator, device=weight.device, dtype=weight.dtype)
    saved = weight.clone()
    weight.copy_(torch.rand(len(weight), generator=generator, device=weight.device, dtype=weight.dtype) + 0.5)
    try:
        expected, fused = module(x), _forward(module, x)
    finally:
        weight.copy_(saved)
    if expected.dtype != fused.dtype:
        return False
    tolerance = TOLERANCES[weight.dtype]
    return bool(torch.allclose(fused.float(), expected.float(), rtol=tolerance, atol=tolerance / 10))
