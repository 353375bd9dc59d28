"""Sharded weights: each process of a training stores a shard of each weight, and all gather a layer when it computes
(ZeRO, arXiv:1910.02054; torch's `fully_shard`, arXiv:2304.11277).

    fsdp     ZeRO stage 3: a layer is gathered in the forward pass, and again in the backward pass
    zero2    ZeRO stage 2: it stays gathered between the two; gradients and optimizer state are sharded
    fsdp_offload    as fsdp, with all shards in the memory of the host, where AdamW takes its steps (`CPUOffloadPolicy`)

Under LoRA the base is sharded, and the small adapter is replicated. In full fine-tuning, gradients and optimizer state
are sharded like the weights. In half precision a sharded weight is its float32 master weight (`adamw`): layers are
gathered and computed in the model's dtype, and gradients are summed in float32. Checkpoints contain whole tensors:
`gather_to_first` gathers a tensor in the process that writes, and `fill` takes this process's shard, so a checkpoint is
the same for any number of processes. The state of an unfinished training is not gathered (`loop.parts`).

A sharded tensor is a DTensor; for any other tensor the functions here do what a single process would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from components.compute.spec import Strategy
from components.errors import ResourceError
from components.models.layer_kinds import decoder
from components.models.spec import ModelSpec
from components.models.targets import other_modules

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def shard(
    base: Any,
    spec: ModelSpec,
    replicated: Collection[torch.nn.Parameter] | None,
    strategy: Strategy,
    fill: Callable[[torch.nn.Module], None] = lambda module: None,
) -> None:
    """Shard the weights of a model over the processes, layer by layer. replicated: parameters of the adapter, which are
    trained and not sharded; None if all weights are trained. fill: function that reads the weights of a module before
    they are sharded (`StreamedModel.fill`). Trained weights in half precision become float32 master weights, which are
    rounded where a layer is gathered. Raises ResourceError for a model that `check` refuses."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    check(base, spec, strategy)
    options: dict[str, Any] = {"ignored_params": set(replicated or ())}
    if strategy == "fsdp_offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    masters = replicated is None and spec.dtype != "float32"
    if masters:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=getattr(torch, spec.dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    body = decoder(base)
    for layer in body.layers:
        fill(layer)
        _widen(layer, masters)
        fully_shard(layer, **options, reshard_after_forward=strategy != "zero2")
    if replicated is None:
        # The head computes after the decoder and may be tied to the embedding, so it joins the decoder's group.
        body.add_module("head", base.get_output_embeddings())
    fill(body)
    _widen(body, masters)
    fully_shard(body, **options)
    fill(base)
    if replicated is None:
        del body.head
        for module in _modules(base):
            module.set_gradient_divide_factor(1.0)  # sum, not mean: token weights refer to the whole batch
            module.set_force_sum_reduction_for_comms(True)  # gloo supports sums only


def _widen(module: torch.nn.Module, masters: bool) -> None:
    """Turn weights into their float32 master weights, if they have some."""
    for parameter in module.parameters() if masters else ():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()


def check(base: Any, spec: ModelSpec, strategy: str) -> None:
    """Raise ResourceError for four-bit weights, and for a model that is more than decoder layers, embeddings and head:
    only these are sharded."""
    if spec.quantization != "none":
        raise ResourceError(
            f"strategy {strategy}: model.quantization={spec.quantization}; expected none, or strategy ddp"
        )
    if others := other_modules(base):
        problem = f"has {', '.join(others)} beside its language model, which cannot be sharded"
    elif not hasattr(decoder(base), "layers"):
        problem = "has no layers under the name that sharding needs (layers)"
    else:
        return
    raise ResourceError(f"strategy {strategy}: {type(base).__name__} {problem}; expected strategy ddp")


def reshard(base: Any, *, again: bool = False) -> None:
    """Reshard the weights that a forward pass has gathered, because they are outdated after a step or a load. again:
    gather the head's weights again, which the backward pass expects where the forward pass left them."""
    for module in _modules(base):
        module.reshard()
    if again:
        decoder(base).unshard()


def _modules(model: torch.nn.Module) -> Iterator[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard, which shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: torch.Tensor) -> int:
    """Return the index of the first row of this process's shard: rows are split as by `torch.chunk`."""
    if not isinstance(tensor, DTensor):
        return 0
    rows, mesh = tensor.shape[0], tensor.device_mesh
    return min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the gathered tensor, detached. All processes must call this."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_to_first(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the tensor in CPU memory, gathered in the first process if it is sharded; the others then return one
    without memory, and all processes must call this. dtype: of the result; None: its own."""
    dtype = dtype or tensor.dtype
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", dtype).contiguous()
    rows, *shape = tensor.shape
    shard = tensor.detach().to_local().to(tensor.device_mesh.device_type, dtype)
    padded = shard.new_zeros(-(-rows // tensor.device_mesh.size()), *shape)
    padded[: len(shard)] = shard
    first = not distributed.get_rank()
    shards = [torch.empty_like(padded) for _ in range(tensor.device_mesh.size())] if first else None
    distributed.gather(padded, shards, dst=0)
    return torch.cat(shards)[:rows].cpu() if shards else torch.empty(rows, *shape, dtype=dtype, device="meta")


@torch.no_grad()
def fill(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Copy this process's shard of a whole tensor into `tensor`."""
    shard = local_shard(tensor)
    first = first_row(tensor)
    shard.copy_(source[first : first + len(shard)] if isinstance(tensor, DTensor) else source)


def norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return the L2 norm of the gradient over all shards, on its device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    own = torch.stack([local_shard(gradient).double().square().sum() for gradient in sharded]).sum()
    square = _sum_over_processes(own, sharded[0])
    square += sum(gradient.double().square().sum() for gradient in gradients if not isinstance(gradient, DTensor))
    return square.sqrt()


def _sum_over_processes(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the sum over the processes of a sharded tensor, on the device of `values`: offloaded shards are on another
    one than that of the collectives."""
    assert isinstance(like, DTensor)
    total = values.to(like.device_mesh.device_type)
    distributed.all_reduce(total)
    return total.to(values.device)


@torch.no_grad()
def clip(parameters: Iterable[torch.nn.Parameter], most: float) -> torch.Tensor:
    """Scale the gradient down to the L2 norm `most`. Return its norm before, on its device: nothing waits for it."""
    parameters = list(parameters)
    if not any(isinstance(parameter.grad, DTensor) for parameter in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, most)
    total_norm = norm(parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            local_shard(parameter.grad).mul_((most / (total_norm + 1e-6)).clamp(max=1.0))
    return total_norm


def non_finite_names(named: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors with a value that is not finite, in any shard."""
    broken = [int(not local_shard(tensor).isfinite().all()) for tensor in named.values()]
    if any(isinstance(tensor, DTensor) for tensor in named.values()):
        broken = _sum_over_processes(torch.tensor(broken), next(iter(named.values()))).tolist()
    return [name for name, count in zip(named, broken, strict=True) if count]


@contextmanager
def swap_values(parameters: Mapping[str, torch.Tensor], by: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Overwrite the parameters with other values within the context, in the same memory."""
    before = {name: local_shard(parameter).detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            local_shard(parameter).copy_(local_shard(by[name]))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                local_shard(parameter).copy_(before[name])
