"""Memory of this process: its size, and the release of freed memory.

glibc keeps freed memory for reuse. A run that trains and then samples needs the memory of the larger of the two, not
of both, so freed memory is returned in between.
"""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Return freed memory to the operating system, if the C library supports it."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc, but not in musl
        if trim is not None:
            trim(0)


def resident_gb() -> float:
    """Return the resident memory of the process in GB (10^9 bytes)."""
    import psutil

    return psutil.Process().memory_info().rss / 1e9
