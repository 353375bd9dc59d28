"""Digests of user source code, computed in several threads."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from components.specs.source import script_digest


@pytest.fixture
def threads_switch_in_garbage_collections():
    """Let every collection of garbage, which building a syntax tree triggers, give way to another thread."""

    def give_way(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    thresholds = gc.get_threshold()
    gc.callbacks.append(give_way)
    gc.set_threshold(50)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(give_way)


def test_threads_get_the_same_digest(tmp_path, threads_switch_in_garbage_collections):
    script = tmp_path / "script.py"
    script.write_text("".join(f"a{n} = [({n} + 1) * (2 - {n}), f(g(h({n})))]\n" for n in range(400)))
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(script_digest, [script] * 8))
    assert len(set(digests)) == 1
