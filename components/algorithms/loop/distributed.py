"""Distributed training: each process computes the gradient of its share of the packs, and all take the same step.

Every process knows all sequences of a step, so each knows the weight of a token in the whole batch; gradients are then
summed, not averaged, and equal those of a single process. Packs are independent of each other, so nothing else is
exchanged. The weights may be sharded over the processes (`sharded`).

After a step all processes have the same adapter, optimizer, metrics and random state. So all get the same folders and
read them, and only the `first` one writes. Dropout is drawn per pack, not per process: it is the same for any number of
processes, and one random state is enough to resume from.

In a single process, or if `torch.distributed` is not initialised, nothing is exchanged and no process waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from components.algorithms.loop import checkpoint

T = TypeVar("T")


def size() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Return the number of this process."""
    return distributed.get_rank() if size() > 1 else 0


def first() -> bool:
    """Return True if this process is the one that writes files."""
    return rank() == 0


def wait() -> None:
    """Wait until all processes have reached this point."""
    if size() > 1:
        distributed.barrier()


def all_equal(value: float) -> bool:
    """Return True if all processes have the same value."""
    if size() == 1:
        return True
    both = torch.tensor([value, -value], dtype=torch.float64, device=_device())
    distributed.all_reduce(both, distributed.ReduceOp.MAX)
    return both[0].item() == -both[1].item()


def smallest(value: float) -> float:
    """Return the smallest value of all processes."""
    if size() == 1:
        return value
    negative = torch.tensor([-value], dtype=torch.float64, device=_device())
    distributed.all_reduce(negative, distributed.ReduceOp.MAX)
    return -negative.item()


def any_process(condition: bool) -> bool:
    """Return True if the condition holds in any process."""
    return sums({"here": float(condition)})["here"] > 0


def share(packs: Sequence[T]) -> list[tuple[T, bool]]:
    """Return the packs that this process computes, and for each whether it counts. All processes get the same number of
    packs, because all take part in gathering a sharded model: a missing pack is filled in with one that does not
    count."""
    return [(packs[index], True) if index < len(packs) else (packs[0], False) for index in _own(len(packs))]


def share_with_dropout(packs: Sequence[T]) -> Iterator[tuple[T, bool]]:
    """Yield the packs of `share`, with dropout: each pack has its own random seed, derived from one number that all
    processes draw. Afterwards the random state is that after this one draw."""
    seed = int(torch.randint(2**62, ()))
    states = checkpoint.random_states()
    for index, shared_pack in zip(_own(len(packs)), share(packs), strict=True):
        torch.manual_seed(seed + index)
        yield shared_pack
    checkpoint.set_random_states(states)


Share = Callable[[Sequence[T]], Iterable[tuple[T, bool]]]
"""Signature of `share` and `share_with_dropout`."""


def _own(count: int) -> list[int]:
    """Return the indices of this process's packs. Indices from `count` on have no pack and are filled in."""
    if size() == 1:
        return list(range(count))
    return [index * size() + rank() for index in range(-(-count // size()))]


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace each gradient by its sum over all processes. A parameter without a gradient in any of them, such as that
    of a role that is not trained, stays without one, so that the optimizer leaves it alone."""
    if size() == 1:
        return
    # Sharded gradients are summed in the backward pass.
    replicated = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    present = torch.tensor([float(parameter.grad is not None) for parameter in replicated])
    for parameter, count in zip(replicated, all_reduce_sum(present).tolist(), strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        distributed.all_reduce(parameter.grad)


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Replace a tensor by its sum over all processes and return it."""
    if size() > 1:
        whole = tensor.to(_device())
        distributed.all_reduce(whole)
        tensor.copy_(whole)
    return tensor


def sums(values: Mapping[str, float]) -> dict[str, float]:
    """Return each value summed over all processes. All processes must pass the same names."""
    if size() == 1:
        return dict(values)
    total = torch.tensor([values[name] for name in sorted(values)], dtype=torch.float64, device=_device())
    distributed.all_reduce(total)
    return dict(zip(sorted(values), total.tolist(), strict=True))


def _device() -> str:
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"
