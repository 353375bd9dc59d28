"""Return of freed memory to the operating system."""

import sys

import pytest

from components.compute.memory import give_back, resident_gb


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries return memory when they like")
def test_freed_memory_is_returned():
    small = [bytearray(16_000) for _ in range(20_000)]  # too small to be mapped one by one
    block = bytearray(16_000)  # above them on the heap: without a trim they stay
    resident = resident_gb()
    del small
    give_back()
    assert resident_gb() < resident - 0.2
    assert len(block) == 16_000
