"""Memory of this process: how much it holds, and giving back what it no longer needs.

glibc keeps freed memory for later. A run that trains and then samples needs the memory of the larger of the two, not
of both, so it is given back in between.
"""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Returns freed memory to the operating system, where the C library can."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)


def resident_gb() -> float:
    """Memory that the process holds now, in GB (10^9 bytes)."""
    import psutil

    return psutil.Process().memory_info().rss / 1e9
