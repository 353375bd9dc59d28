"""CUDA graphs: kernels that are recorded once, and started by a single call of the host from then on.

A small model leaves a GPU waiting for the host, which starts its kernels one by one. A graph starts all of them, on the
memory on which they were recorded. Numbers and shapes on the host stay as they were. So the recorded function reads
what changes from static tensors, which the caller overwrites before each replay; it never reads the device from the
host; and the tensors that it uses must stay where they are (`addresses`).

All graphs of a `GraphRecorder` share one pool of memory, whose size is that of the largest. A result is therefore valid
until another graph of the pool is replayed. Recording computes nothing: results are undefined before the first replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from components.errors import ResourceError

T = TypeVar("T")

WARM_UP = 3
"""Number of calls before a function is recorded, as in torch's `make_graphed_callables`."""


class GraphRecorder:
    """Recorder of graphs that share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], object]) -> None:
        """Call a function on a stream of its own, so that libraries and compilers are ready before it is recorded."""
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(WARM_UP):
                function()
        torch.cuda.synchronize()

    def record(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Return the results of a function, and the function that computes them again in the same memory. Other threads
        may use the GPU meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.stream(torch.cuda.current_stream()),  # `graph` does not restore it when recording fails
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            results = function()
        return results, graph.replay


def require_gpu(device: str) -> None:
    """Raise ResourceError for a device without CUDA graphs."""
    if device != "cuda":
        raise ResourceError(
            f"model.cuda_graphs = true: needs a GPU, but the model computes on device={device!r}; set "
            "model.cuda_graphs=false, or run on a machine with a GPU"
        )


def padded_size(count: int, least: int, parts: int) -> int:
    """Return the smallest size of at least `count` among `least` and `parts` sizes from each power of two to the next,
    so that few sizes occur."""
    if count <= least:
        return least
    step = max(1, (1 << ((count - 1).bit_length() - 1)) // parts)
    return -(-count // step) * step


def addresses(module: torch.nn.Module) -> tuple[int, ...]:
    """Return the addresses of a module's parameters and buffers, at which its graphs read them."""
    return tuple(tensor.data_ptr() for tensors in (module.parameters(), module.buffers()) for tensor in tensors)
