"""Weights of linear layers in the memory layout of oneDNN, for inference in float32 on a CPU.

A decoding step multiplies a few rows with all weights. In PyTorch's layout, each product of few rows first rearranges
the weights; packed once, they take up to a sixth less time of a whole step. The copies take as much memory as the
weights.

A product is the same for any number of rows from two on. It differs from that in PyTorch's layout by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch

ROWS = 64
"""Number of rows for which oneDNN chooses the layout."""


def pack(model: torch.nn.Module, changed: Iterable[torch.nn.Parameter] | None = None) -> None:
    """Pack the weights of a model's linear layers, for passes without gradients. Other layers stay as they are.

    changed: parameters whose values changed since the last call; None: all.
    """
    selected = None if changed is None else {id(parameter) for parameter in changed}
    for layer in model.modules():
        if _suitable(layer) and (selected is None or id(layer.weight) in selected):
            layer.packed_weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
            layer.forward = MethodType(_forward, layer)


def _suitable(layer: Any) -> bool:
    """Return True for a module whose weights oneDNN can pack."""
    return (
        type(layer) is torch.nn.Linear
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
    )


def _forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() or not x.numel():
        return torch.nn.Linear.forward(layer, x)
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.packed_weight, layer.bias, "none", [], "")
    return result
