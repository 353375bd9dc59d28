"""Gradient steps of GRPO with default settings, compared with TRL's `GRPOTrainer`, without and with Liger's kernels.

Each side takes one step after the other: two that warm up, those that are timed, and one under the profiler, which
counts kernels and the time during which the GPU is busy. A side's memory is what torch reserves beyond its weights,
which includes the pools of CUDA graphs. TRL's micro-batch has the most rows that fit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.benchmarks import train_step
from tests.benchmarks.gpu.machine import clocks
from tests.benchmarks.gpu.report import Report
from tests.benchmarks.gpu.setup import GROUP, Setup, free
from tests.benchmarks.train_step import Clock, Episode, Ours, Trl

WARM = 2
"""Steps of each side before those that are timed."""
Side = Callable[[Setup, list[Episode], "Meter"], None]
"""Takes the steps of a side."""


def run(setup: Setup, report: Report) -> None:
    report.update(dtype=setup.dtype, matrix_tflops=matrix_rate(setup), workloads={})
    for name in setup.shape.workloads:
        measure(setup, report, name)
        if setup.device == "cuda":
            report.update(clocks=clocks())


def measure(setup: Setup, report: Report, name: str) -> None:
    """Measure all sides on one workload."""
    episodes = train_step.workload(name, setup.shape.vocabulary, setup.shape.scale)
    trie = train_step.trie(episodes)
    shape = setup.shape
    config = SimpleNamespace(
        hidden_size=shape.hidden,
        vocab_size=shape.vocabulary,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
    )
    counts = (trie.nodes, trie.seen, trie.predicting)
    tflop = 2 * train_step.multiplications(config, setup.linear_weights(), *counts) / 1e12
    tokens = sum(len(episode.token_ids) for episode in episodes)
    figures: dict[str, Any] = {"tokens": tokens, "distinct_tokens": trie.nodes, "tflop": round(tflop, 4), "sides": {}}
    report.result["workloads"][name] = figures
    for side, (label, take) in SIDES.items():
        meter = Meter(setup.device, setup.repeat)
        try:
            take(setup, episodes, meter)
        except Exception as error:  # noqa: BLE001  a side that fails here must not lose the others
            report.skip(f"{side} ({name})", error)
        finally:
            free()
        if meter.timed:
            figures["sides"][side] = {"label": label, **meter.figures(tokens, tflop, report.result["matrix_tflops"])}
            report.update()


def take_ours(setup: Setup, episodes: list[Episode], meter: Meter) -> None:
    ours = Ours(setup.base_dir, setup.step_model(), episodes, 0, setup.folder / "ours", settings={})
    if ours.policy.padded:
        raise RuntimeError("the policy computes padded rows, because the check of packs failed (see the log)")
    for _ in range(meter.count):
        meter.begin()
        ours.step()
        meter.end()


def take_trl(setup: Setup, episodes: list[Episode], meter: Meter, **settings: Any) -> None:
    """Take TRL's steps, with the largest micro-batch that fits."""
    import torch

    rows = GROUP
    while True:
        meter.reset()
        side = Trl(setup.base_dir, setup.step_model(), episodes, rows, setup.folder)
        try:
            side.train(meter.count, meter, **settings)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
            rows //= 2
            del side
            free()
        else:
            return


def take_trl_with_liger(setup: Setup, episodes: list[Episode], meter: Meter) -> None:
    import liger_kernel  # type: ignore[import-not-found]  # noqa: F401

    if setup.device == "cpu":
        raise RuntimeError("Liger's kernels need a GPU")
    take_trl(setup, episodes, meter, use_liger_kernel=True)


SIDES: dict[str, tuple[str, Side]] = {
    "ours": ("Espalier", take_ours),
    "trl": ("TRL `GRPOTrainer`", take_trl),
    "trl_liger": ("TRL `GRPOTrainer`, Liger kernels", take_trl_with_liger),
}


class Meter(Clock):
    """Clock of the steps of a side, with their memory, and the kernels of the last step."""

    def __init__(self, device: str, repeat: int):
        super().__init__(device)
        self.count = WARM + repeat + 1
        self.reset()

    def reset(self) -> None:
        self.seconds = []
        self.peak_mb = 0.0
        self.kernels: dict[str, Any] = {}
        self._profile: Any = None

    @property
    def timed(self) -> list[float]:
        return self.seconds[WARM : self.count - 1]

    def begin(self) -> None:
        if not self.seconds:
            self._before = self._reserved_mb(start=True)
        if len(self.seconds) == self.count - 1:
            self._profile = profiler(self.device)
            self._profile.start()
        super().begin()

    def end(self) -> None:
        super().end()
        if self._profile is not None:
            self._profile.stop()
            self.kernels = activity(self._profile.events(), self.device)
            self._profile = None
        self.peak_mb = max(self.peak_mb, self._reserved_mb() - self._before)

    def _reserved_mb(self, start: bool = False) -> float:
        """Return the most MB that were reserved so far, or with `start` those that are reserved now."""
        import torch

        if self.device == "cpu":
            return train_step.trimmed_mb() if start else train_step.highest_mb()
        if start:
            free()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_reserved() / 1e6
        return torch.cuda.max_memory_reserved() / 1e6

    def figures(self, tokens: int, tflop: float, rate: float) -> dict[str, Any]:
        """Return the results. tflop: operations of a step. rate: matrix rate in TFLOP/s."""
        median = statistics.median(self.timed)
        shares = {"matrix_share": round(tflop / rate / median, 4)}
        if "busy_seconds" in self.kernels:
            shares["busy_share"] = round(self.kernels["busy_seconds"] / median, 3)
        return {
            "seconds": {
                "min": round(min(self.timed), 4),
                "median": round(median, 4),
                "max": round(max(self.timed), 4),
            },
            "first_seconds": round(self.seconds[0], 2),
            "repetitions": len(self.timed),
            "tokens_per_s": round(tokens / median),
            "peak_mb": round(self.peak_mb, 1),
            **self.kernels,
            **shares,
        }


def profiler(device: str) -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU], acc_events=True)


def activity(events: Any, device: str) -> dict[str, Any]:
    """Return counts of the profiled events: on a GPU kernels, reads by the host, launches of graphs and the seconds
    during which anything ran; on a CPU operators."""
    if device == "cpu":
        return {"operators": sum(event.name.startswith("aten::") for event in events)}
    from torch.autograd import DeviceType

    on_device = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    copies = [event for event in on_device if event.name.startswith(("Memcpy", "Memset"))]
    busy, until = 0.0, 0.0
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in on_device):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return {
        "kernels": len(on_device) - len(copies),
        "host_reads": sum("DtoH" in event.name for event in copies),
        "graph_launches": sum(event.name == "cudaGraphLaunch" for event in events),
        "busy_seconds": round(busy / 1e6, 4),
    }


def matrix_rate(setup: Setup) -> float:
    """Return the measured rate of a matrix product on random data, in TFLOP/s."""
    import torch

    size = setup.shape.matrix
    dtype = getattr(torch, setup.dtype)
    left, right = (torch.randn(size, size, device=setup.device, dtype=dtype) for _ in range(2))
    rates = []
    for _ in range(4):
        train_step.synchronize(setup.device)
        start = time.perf_counter()
        for _ in range(5):
            left @ right
        train_step.synchronize(setup.device)
        rates.append(5 * 2 * size**3 / (time.perf_counter() - start) / 1e12)
    return round(statistics.median(rates[1:]), 3)
