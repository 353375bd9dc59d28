"""LoRA layers with few kernels, for training on a GPU.

PEFT computes `W x + (alpha / r) · B A x` (arXiv:2106.09685, section 3) with the adapter in float32 and the base in
bfloat16: inputs and outputs are converted, and each sum and product is a kernel of its own. Here A and (alpha / r) · B
are rounded to the dtype of the base once a step, as an engine does that serves them; the update is added by the matrix
product itself; and gradients of A and B are sums in float32. Layers of the same input (q, k, v; gate, up) are computed
together: their A are one matrix, forward and backward, and the products add the gradients of their input.

Layers that compute more than this (dropout, merged or several adapters, variants of LoRA, a quantized base, a base in
float16, whose range small values of B leave) keep PEFT's forward pass, as do all layers on a CPU.

Legend: N tokens, I inputs, O outputs, R rank, K layers of a group.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import linear

DTYPES = (torch.float32, torch.bfloat16)
TOGETHER = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Names of the layers of a module that get the same input. Layers that get another one are computed by themselves."""


def fuse(model: Any) -> int:
    """Give the LoRA layers of a PEFT model the fused forward pass, and return their number."""
    from peft.tuners.lora.layer import Linear

    groups: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for name, module in model.named_modules():
        if type(module) is Linear and type(module.base_layer) is torch.nn.Linear:
            if module.base_layer.weight.dtype not in DTYPES:
                continue
            parent, _, last = name.rpartition(".")
            kind = next((index for index, names in enumerate(TOGETHER) if last in names), None)
            groups[(name, -1) if kind is None else (parent, kind)].append(module)
    for layers in groups.values():
        group = Group(layers)
        for layer in layers:
            layer.forward = partial(group.forward, layer)
    return sum(map(len, groups.values()))


def forget(model: Any) -> None:
    """Drop what the groups of a model have cached: a CUDA graph must not read it, nor leave its own there."""
    for module in model.modules():
        group = getattr(getattr(vars(module).get("forward"), "func", None), "__self__", None)
        if isinstance(group, Group):
            group.forget()


class Group:
    """LoRA layers of the same input. The first one that is called with it computes the outputs of all."""

    def __init__(self, layers: Sequence[Any]):
        self._layers = layers
        self._outputs: dict[int, torch.Tensor] = {}
        """Outputs that are not yet asked for, by id() of the layer."""
        self._input: tuple[Any, ...] = ()
        """The input that these belong to, as `_state`."""
        self._rounded: dict[str, tuple[Any, ...]] = {}

    def forget(self) -> None:
        """Drop outputs that are not yet asked for, and rounded adapters."""
        self._outputs, self._input, self._rounded = {}, (), {}

    def forward(self, layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the output of one of the layers."""
        names = layer.active_adapters
        if not args and not kwargs and len(names) == 1:
            pending = self._outputs.pop(id(layer), None)
            if pending is not None and self._is_input(x, names[0]):
                return pending
            scales = {member.scaling.get(names[0]) for member in self._layers}
            if len(scales) == 1 and all(_is_plain(member, names[0]) for member in self._layers):
                return self._compute(layer, x, names[0])
        result: torch.Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return result

    def _is_input(self, x: torch.Tensor, name: str) -> bool:
        reference, *state = self._input
        return reference() is x and state == [x._version, name, torch.is_grad_enabled()]

    def _compute(self, layer: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        adapters = [(member.lora_A[name].weight, member.lora_B[name].weight) for member in self._layers]
        bases = [(member.base_layer.weight, member.base_layer.bias) for member in self._layers]
        scale = layer.scaling[name]
        outs = _Lora.apply(x, self._round(name, x.dtype, adapters, scale), scale, bases, *chain(*adapters))
        self._input = weakref.ref(x), x._version, name, torch.is_grad_enabled()
        self._outputs = {id(member): out for member, out in zip(self._layers, outs, strict=True)}
        own: torch.Tensor = self._outputs.pop(id(layer))
        return own

    @torch.no_grad()
    def _round(
        self, name: str, dtype: torch.dtype, adapters: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the (K R, I) joined A and each scale · B, (O, R), rounded to the dtype of the base. Cached until a
        parameter changes."""
        state = [dtype, *((tensor.data_ptr(), tensor._version) for pair in adapters for tensor in pair)]
        cached_state, rounded = self._rounded.get(name, (None, None))
        if cached_state != state:
            a_KRI = torch.cat([a_RI for a_RI, _ in adapters]).to(dtype)
            rounded = a_KRI, [(b_OR * scale).to(dtype) for _, b_OR in adapters]
            self._rounded[name] = state, rounded
        assert rounded is not None
        return rounded


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
        rounded: tuple[torch.Tensor, list[torch.Tensor]],
        scale: float,
        bases: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        *adapters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the layers. bases: weight and bias of each. adapters: A and B of each, which only get
        gradients here."""
        x_NI, (a_KRI, bs_OR) = x.reshape(-1, x.shape[-1]), rounded
        ax_NKR = x_NI @ a_KRI.T
        ctx.ranks = [b_OR.shape[1] for b_OR in bs_OR]
        outs = [linear(x, *base) for base in bases]
        for out, b_OR, ax_NR in zip(outs, bs_OR, ax_NKR.split(ctx.ranks, 1), strict=True):
            out.view(len(x_NI), -1).addmm_(ax_NR, b_OR.T)
        ctx.save_for_backward(x_NI, a_KRI, ax_NKR, *bs_OR, *(weight_OI for weight_OI, _ in bases))
        ctx.scale, ctx.dtypes = scale, (adapters[0].dtype, adapters[1].dtype)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NI, a_KRI, ax_NKR, *tensors = ctx.saved_tensors
        layers = len(ctx.ranks)
        outs_NO = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        ax_grad_NKR = torch.empty_like(ax_NKR)
        for out_NO, b_OR, part_NR in zip(outs_NO, tensors[:layers], ax_grad_NKR.split(ctx.ranks, 1), strict=True):
            torch.mm(out_NO, b_OR, out=part_NR)
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad_NI = ax_grad_NKR @ a_KRI
            for out_NO, weight_OI in zip(outs_NO, tensors[layers:], strict=True):
                x_grad_NI.addmm_(out_NO, weight_OI)
            x_grad = x_grad_NI.view(*grads[0].shape[:-1], -1)
        adapter_grads: list[torch.Tensor | None] = [None] * (2 * layers)
        if any(ctx.needs_input_grad[4:]):
            adapter_grads[::2] = product(ax_grad_NKR.T, x_NI, ctx.dtypes[0]).split(ctx.ranks)
            adapter_grads[1::2] = [
                product(out_NO.T, ax_NR, ctx.dtypes[1])
                for out_NO, ax_NR in zip(outs_NO, (ax_NKR * ctx.scale).split(ctx.ranks, 1), strict=True)
            ]
        return x_grad, None, None, None, *adapter_grads


def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix product in `dtype`, on a GPU without rounding to the dtype of the factors in between."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
