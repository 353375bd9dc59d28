"""Computation of a model in float32, whatever the dtype of its weights, without a copy of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def widened(model: PreTrainedModel) -> Iterator[None]:
    """Compute a model in float32 within the context: the parameters of each layer are widened before its forward pass
    and restored after it, so that those of one layer are in memory twice. Quantized linear layers store the same values
    and compute in float32."""
    original: dict[torch.nn.Parameter, torch.Tensor] = {}
    entered: list[torch.nn.Module] = []

    def widen(module: torch.nn.Module, *_: Any) -> None:
        entered.append(module)
        for parameter in module.parameters(recurse=module in layers):
            if parameter.dtype in (torch.bfloat16, torch.float16):
                original.setdefault(parameter, parameter.data)
                parameter.data = parameter.data.float()

    def restore(*_: Any) -> None:
        entered.pop()
        if not entered:  # a layer may read parameters of its modules without calling these
            for parameter, data in original.items():
                parameter.data = data
            original.clear()

    layers = {child for module in model.modules() if isinstance(module, torch.nn.ModuleList) for child in module}
    hooks: list[RemovableHandle] = []
    computed_in = {module: module.compute_dtype for module in model.modules() if hasattr(module, "compute_dtype")}
    for module in model.modules():
        if module in layers or any(True for _ in module.parameters(recurse=False)):
            hooks += [
                module.register_forward_pre_hook(widen),
                module.register_forward_hook(restore, always_call=True),
            ]
    try:
        for module in computed_in:
            module.compute_dtype = torch.float32
        yield
    finally:
        for module, dtype in computed_in.items():
            module.compute_dtype = dtype
        for hook in hooks:
            hook.remove()
        for parameter, data in original.items():
            parameter.data = data
