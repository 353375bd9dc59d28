"""Computation of a model in float32, whatever the dtype of its weights, without a copy of the whole model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def widened(model: PreTrainedModel) -> Iterator[None]:
    """Compute a model in float32 within the context: the parameters of each layer are widened before its forward pass
    and restored after it, so that those of one layer are in memory twice; embedding, last norm and head, whose dtype
    models read before they call these modules, for the whole context. Quantized linear layers store the same values and
    compute in float32."""
    original: dict[torch.nn.Parameter, torch.Tensor] = {}
    entered: list[torch.nn.Module] = []
    layers = {child for module in model.modules() if isinstance(module, torch.nn.ModuleList) for child in module}
    inside = {parameter for layer in layers for parameter in layer.parameters()}

    def widen(parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.dtype in (torch.bfloat16, torch.float16):
                original.setdefault(parameter, parameter.data)
                parameter.data = parameter.data.float()

    def restore(parameters: Collection[torch.nn.Parameter]) -> None:
        for parameter in [parameter for parameter in original if parameter in parameters]:
            parameter.data = original.pop(parameter)

    def enter(module: torch.nn.Module, *_: Any) -> None:
        entered.append(module)
        widen(module.parameters(recurse=module in layers))

    def leave(*_: Any) -> None:
        entered.pop()
        if not entered:  # a layer may read parameters of its modules without calling these
            restore(inside)

    hooks: list[RemovableHandle] = []
    for module in model.modules():
        if module in layers or any(parameter in inside for parameter in module.parameters(recurse=False)):
            hooks += [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave, always_call=True),
            ]
    computed_in = {module: module.compute_dtype for module in model.modules() if hasattr(module, "compute_dtype")}
    try:
        widen(parameter for parameter in model.parameters() if parameter not in inside)
        for module in computed_in:
            module.compute_dtype = torch.float32
        yield
    finally:
        for module, dtype in computed_in.items():
            module.compute_dtype = dtype
        for hook in hooks:
            hook.remove()
        restore(set(original))
