"""Weights in parts: each process of a training holds a part of each weight, and all put a layer together when it
computes (ZeRO, arXiv:1910.02054; torch's `fully_shard`, arXiv:2304.11277).

    fsdp     stage 3 of ZeRO: a layer is put together in the forward pass, and again in the backward pass
    zero2    stage 2: it stays together between the two; gradients and what the optimizer keeps lie in parts

Under LoRA the base is in parts, and the adapter, which is small, stays whole everywhere. Where all weights learn, their
gradients are summed part by part, and so is what the optimizer does. What is saved is whole: `whole` puts it together,
`fill` takes this process's part of it, so that a checkpoint is the same for any number of processes.

A tensor in parts is a DTensor; of any other the functions here do what one process would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, distribute_tensor

from components.compute.spec import Strategy
from components.errors import ResourceError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from components.algorithms.policy.policy import Policy


def shard(policy: Policy, strategy: Strategy = "fsdp") -> None:
    """Distributes the weights of the model over the processes, layer by layer. Raises ResourceError for weights that
    cannot be distributed: those held in four bits, and those that learn in another type than float32."""
    from torch.distributed.fsdp import fully_shard

    spec = policy.spec
    if spec.quantization != "none":
        raise ResourceError(
            f"strategy {strategy}: model.quantization={spec.quantization}; expected none, or strategy ddp"
        )
    if policy.adapter is None and spec.dtype != "float32":
        raise ResourceError(
            f"strategy {strategy}: model.lora=null and model.dtype={spec.dtype}: gradients of many packs would be "
            "rounded one after another; expected model.dtype=float32, model.lora with a rank, or strategy ddp"
        )
    learning = set(policy.parameters.values()) if policy.adapter is not None else set()
    decoder = policy.base.base_model
    for layer in decoder.layers:
        fully_shard(layer, ignored_params=learning, reshard_after_forward=strategy == "fsdp")
    if policy.adapter is None:  # the head may be the embedding, and computes after the decoder: it is part of the same
        decoder.add_module("head", policy.base.get_output_embeddings())
    fully_shard(decoder, ignored_params=learning)
    if policy.adapter is None:
        del decoder.head
        for module in _modules(policy.base):
            module.set_gradient_divide_factor(1.0)  # the sum: weights of tokens are those of the whole batch
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        policy.hold_in_parts(partial(settle, policy))


def settle(policy: Policy, *, again: bool = False) -> None:
    """Lets go of weights that a forward pass has put together: those of before a step or a load are no use. again: puts
    together those that a backward pass finds where the forward pass had left them, the head's."""
    for module in _modules(policy.base):
        module.reshard()
    if again:
        policy.base.base_model.unshard()


def _modules(model: torch.nn.Module) -> Iterator[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part, in the memory of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor put together, without its gradient. All processes ask for it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, the same in all processes, as `like` lies."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def fill(tensor: torch.Tensor, given: torch.Tensor) -> None:
    """Takes this process's part of a whole tensor."""
    own(tensor).copy_(own(part(given, tensor)))


def norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    """L2 norm of the gradient, over all parts."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not any(isinstance(one, DTensor) for one in gradients):
        return torch.nn.utils.get_total_norm(gradients).item()
    square = torch.stack([own(one).double().square().sum() for one in gradients if isinstance(one, DTensor)]).sum()
    distributed.all_reduce(square)
    square += sum(one.double().square().sum() for one in gradients if not isinstance(one, DTensor))
    return math.sqrt(square.item())


@torch.no_grad()
def clip(parameters: Iterable[torch.nn.Parameter], most: float) -> float:
    """Scales the gradient down to the L2 norm `most`; returns what its norm was."""
    parameters = list(parameters)
    if not any(isinstance(one.grad, DTensor) for one in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, most).item()
    found = norm(parameters)
    for one in parameters:
        if one.grad is not None:
            own(one.grad).mul_(min(1.0, most / (found + 1e-6)))
    return found


def not_finite(named: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that hold a number which is not finite, in any part."""
    broken = [int(not own(one).isfinite().all()) for one in named.values()]
    if any(isinstance(one, DTensor) for one in named.values()):
        counted = torch.tensor(broken, device=own(next(iter(named.values()))).device)
        distributed.all_reduce(counted)
        broken = counted.tolist()
    return [name for name, count in zip(named, broken, strict=True) if count]


@contextmanager
def replaced(parameters: Mapping[str, torch.Tensor], by: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, each parameter holds other numbers, in the same memory."""
    before = {name: own(one).detach().clone() for name, one in parameters.items()}
    with torch.no_grad():
        for name, one in parameters.items():
            own(one).copy_(own(by[name]))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, one in parameters.items():
                own(one).copy_(before[name])
