"""Training in several processes: each computes the gradient of its share of the packs, and all take the same step.

Every process holds all trajectories, so each knows the weight of a token in the whole batch; gradients are then summed,
not averaged, and equal those of one process. Packs are independent of each other, so nothing else is exchanged. The
weights may lie in parts on the processes (`sharded`).

After a step all processes hold the same: adapter, optimizer, metrics, random state. So they are all given the same
folders, all read them, and the `first` one alone writes. What drops out is drawn by pack, not by process: it is the
same in any number of them, and one random state is enough to go on from.

In one process, or where `torch.distributed` was not initialised, nothing is exchanged and nobody waited for.
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
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def first() -> bool:
    """Whether this process is the one that writes files."""
    return size() == 1 or distributed.get_rank() == 0


def wait() -> None:
    """Until all processes are here."""
    if size() > 1:
        distributed.barrier()


def alike(value: float) -> bool:
    """Whether all processes have the same value."""
    if size() == 1:
        return True
    both = torch.tensor([value, -value], dtype=torch.float64, device=_device())
    distributed.all_reduce(both, distributed.ReduceOp.MAX)
    return both[0].item() == -both[1].item()


def any_of(here: bool) -> bool:
    """Whether it is so in one of the processes."""
    return sums({"here": float(here)})["here"] > 0


def share(packs: Sequence[T]) -> list[tuple[T, bool]]:
    """The packs that this process computes, and whether each counts. All have equally many, for a sharded model is
    put together by all at once: what is missing is filled up with a pack that does not count."""
    return [(packs[index], True) if index < len(packs) else (packs[0], False) for index in _own(len(packs))]


def share_drawing(packs: Sequence[T]) -> Iterator[tuple[T, bool]]:
    """The same, where something may drop out: each pack has random numbers of its own, made of one number that all
    processes draw. The random state afterwards is that after this one number."""
    seed = int(torch.randint(2**62, ()))
    drawn = checkpoint.random_states()
    for index, given in zip(_own(len(packs)), share(packs), strict=True):
        torch.manual_seed(seed + index)
        yield given
    checkpoint.set_random_states(drawn)


Share = Callable[[Sequence[T]], Iterable[tuple[T, bool]]]
"""One of these two."""


def _own(count: int) -> list[int]:
    """Indices of this process's packs; from `count` on there is none, and the process fills up."""
    if size() == 1:
        return list(range(count))
    return [index * size() + distributed.get_rank() for index in range(-(-count // size()))]


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Puts the sum over all processes in the place of each gradient."""
    if size() == 1:
        return
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            continue  # in parts, which are summed as they come
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        distributed.all_reduce(parameter.grad)


def add_up(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all processes, in its place."""
    if size() > 1:
        whole = tensor.to(_device())
        distributed.all_reduce(whole)
        tensor.copy_(whole)
    return tensor


def sums(values: Mapping[str, float]) -> dict[str, float]:
    """Each value summed over all processes; all have the same names."""
    if size() == 1:
        return dict(values)
    total = torch.tensor([values[name] for name in sorted(values)], dtype=torch.float64, device=_device())
    distributed.all_reduce(total)
    return dict(zip(sorted(values), total.tolist(), strict=True))


def _device() -> str:
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"
