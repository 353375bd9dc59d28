"""Memory of a GPU that a vLLM server shares with the trainer of this process."""

from __future__ import annotations

import gc
import math
import sys

AWAKE, ASLEEP = 0.5, 0.9
"""Share of the free memory for a server beside a trainer, and for one that sleeps while the trainer computes."""
WHERE_UNKNOWN = 0.5
"""Share of the GPU's memory if torch sees none in this process."""


def share_of(free: int, total: int, *, sleeps: bool) -> float:
    """Return `--gpu-memory-utilization`, a share of the total memory in bytes, rounded down: vLLM refuses a share of
    which less is free."""
    return max(math.floor((ASLEEP if sleeps else AWAKE) * free / total * 100) / 100, 0.01)


def free_share(*, sleeps: bool) -> float:
    """Return the share of the GPU for a server, by the memory that is free now."""
    import torch

    if not torch.cuda.is_available():
        return WHERE_UNKNOWN
    release_unused()
    free, total = torch.cuda.mem_get_info()
    return share_of(free, total, sleeps=sleeps)


def release_unused() -> None:
    """Return the memory that torch holds without using it to the GPU, for other processes."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
