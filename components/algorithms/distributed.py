"""Training in several processes: each computes the gradient of its share of the packs, and all take the same step.

Every process holds all trajectories, so each knows the weight of a token in the whole batch; gradients are then summed,
not averaged, and equal those of one process. Packs are independent of each other, so nothing else is exchanged. With
`shard` the weights of the base model, which do not learn, lie in parts on the processes (FSDP, arXiv:2304.11277); the
adapter is small and stays whole everywhere.

In one process, or where `torch.distributed` was not initialised, all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import distributed

if TYPE_CHECKING:
    from components.algorithms.policy import Policy

T = TypeVar("T")


def size() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def share(packs: Sequence[T]) -> list[tuple[T, bool]]:
    """The packs that this process computes, and whether each counts. All have equally many, for a sharded model is
    put together by all at once: what is missing is filled up with a pack that does not count."""
    if size() == 1:
        return [(one, True) for one in packs]
    rounds = -(-len(packs) // size())
    own = [index * size() + distributed.get_rank() for index in range(rounds)]
    return [(packs[index], True) if index < len(packs) else (packs[0], False) for index in own]


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Puts the sum over all processes in the place of each gradient."""
    if size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        distributed.all_reduce(parameter.grad)


def sums(values: Mapping[str, float]) -> dict[str, float]:
    """Each value summed over all processes; all have the same names."""
    if size() == 1:
        return dict(values)
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    total = torch.tensor([values[name] for name in sorted(values)], dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return dict(zip(sorted(values), total.tolist(), strict=True))


def shard(policy: Policy) -> None:
    """Distributes the weights of the base model over the processes, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    learning = set(policy.parameters.values())
    decoder = policy.base.base_model
    for layer in decoder.layers:
        fully_shard(layer, ignored_params=learning)
    fully_shard(decoder, ignored_params=learning)
