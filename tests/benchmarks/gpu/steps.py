"""Gradient steps of GRPO with default settings, without and with CUDA graphs, compared with TRL's `GRPOTrainer`, with
and without Liger's kernels.

A side loads its weights once and takes the steps of all workloads, before the next side, whose settings of torch and
patches of transformers do not affect it: two that warm up, those that are timed, and one under the profiler, which
counts kernels and the time during which the GPU is busy. The first step counts from the start of the side or workload,
with all loading, checks and compilation. A side's memory is what torch reserves beyond its weights, which includes the
pools of CUDA graphs. TRL's micro-batch has the most rows that fit.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.benchmarks import train_step
from tests.benchmarks.gpu.machine import clocks
from tests.benchmarks.gpu.report import Report
from tests.benchmarks.gpu.setup import GROUP, Setup, free
from tests.benchmarks.train_step import Clock, Episode, Ours, Trl

WARM = 2
"""Steps of each side before those that are timed."""
Take = Callable[[list[Episode]], None]
"""Takes the steps of a workload."""
Side = Callable[[Setup, "Meter"], contextlib.AbstractContextManager[Take]]
"""Loads the weights of a side."""


def run(setup: Setup, report: Report) -> None:
    workloads = {name: setup.workload(name) for name in setup.shape.workloads}
    heads = {name: counts(setup, episodes) for name, episodes in workloads.items()}
    _ = setup.base_dir  # written before the first side begins
    report.update(dtype=setup.dtype, matrix_tflops=matrix_rate(setup), workloads=heads)
    for side, (label, load) in SIDES.items():
        try:
            measure(setup, report, workloads, side, label, load)
        except Exception as error:  # noqa: BLE001  a side that fails here must not lose the others
            report.skip(side, error)
        free()


def measure(
    setup: Setup, report: Report, workloads: dict[str, list[Episode]], side: str, label: str, load: Side
) -> None:
    """Take the steps of a side. If those of a workload fail, the next workload follows."""
    meter = Meter(setup.device, setup.repeat)
    with load(setup, meter) as take:
        for name, episodes in workloads.items():
            meter.reset()
            try:
                take(episodes)
            except Exception as error:  # noqa: BLE001
                report.skip(f"{side} ({name})", error)
            free()
            meter.loading = None
            head = report.result["workloads"][name]
            if meter.timed:
                head["sides"][side] = {"label": label, **meter.figures(head, report.result["matrix_tflops"])}
            report.update(clocks=clocks() if setup.device == "cuda" else None)


def counts(setup: Setup, episodes: list[Episode]) -> dict[str, Any]:
    """Return tokens and counted operations of a workload."""
    trie = train_step.trie(episodes)
    sizes = (setup.linear_weights(), trie.nodes, trie.seen, trie.predicting)
    operations = train_step.multiplications(setup.config, *sizes)
    return {
        "tokens": sum(len(episode.token_ids) for episode in episodes),
        "distinct_tokens": trie.nodes,
        "tflop": round(2 * operations / 1e12, 4),
        "sides": {},
    }


@contextlib.contextmanager
def load_ours(setup: Setup, meter: Meter, cuda_graphs: bool = False) -> Iterator[Take]:
    spec = setup.step_model().model_copy(update={"cuda_graphs": cuda_graphs})
    ours = Ours(setup.base_dir, spec, [], 0, setup.folder / "ours", settings={})
    if ours.policy.padded:
        raise RuntimeError("the policy computes padded rows, because the check of packs failed (see the log)")
    meter.loaded()

    def take(episodes: list[Episode]) -> None:
        ours.use(episodes)
        for _ in range(meter.count):
            meter.begin()
            ours.step()
            meter.end()

    yield take


@contextlib.contextmanager
def load_trl(setup: Setup, meter: Meter, **settings: Any) -> Iterator[Take]:
    side = Trl(setup.base_dir, setup.step_model(), [], GROUP, setup.folder)
    meter.loaded()

    def take(episodes: list[Episode]) -> None:
        """Take TRL's steps, with the largest micro-batch that fits."""
        import torch

        side.episodes, side.rows = episodes, GROUP
        while True:
            meter.reset()
            try:
                side.train(meter.count, meter, **settings)
            except torch.OutOfMemoryError:
                if side.rows == 1:
                    raise
                side.rows //= 2
                free()
            else:
                return

    yield take


@contextlib.contextmanager
def load_trl_with_liger(setup: Setup, meter: Meter) -> Iterator[Take]:
    import liger_kernel  # type: ignore[import-not-found]  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3

    if setup.device == "cpu":
        raise RuntimeError("Liger's kernels need a GPU")
    unpatched = dict(vars(modeling_qwen3))  # Liger replaces functions and classes of the module
    try:
        with load_trl(setup, meter, use_liger_kernel=True) as take:
            yield take
    finally:
        vars(modeling_qwen3).update(unpatched)


SIDES: dict[str, tuple[str, Side]] = {
    "ours": ("Espalier", load_ours),
    "ours_graphed": ("Espalier, `model.cuda_graphs=true`", partial(load_ours, cuda_graphs=True)),
    "trl": ("TRL `GRPOTrainer`", load_trl),
    "trl_liger": ("TRL `GRPOTrainer`, Liger kernels", load_trl_with_liger),
}


class Meter(Clock):
    """Clock of the steps of a side, with their memory, and the kernels of the last step."""

    def __init__(self, device: str, repeat: int):
        super().__init__(device)
        self.count = WARM + repeat + 1
        self.loading: float | None = time.perf_counter()
        """Start of the side, until its first workload is measured."""
        self._weights_mb = 0.0
        self.reset()

    def reset(self) -> None:
        """Begin with another workload."""
        self.seconds: list[float] = []
        self.first_seconds = self.peak_mb = 0.0
        self.kernels: dict[str, Any] = {}
        self._profile: Any = None
        self._began = time.perf_counter()

    def loaded(self) -> None:
        """Count memory from here."""
        self._weights_mb = self._reserved_mb(start=True)

    @property
    def timed(self) -> list[float]:
        return self.seconds[WARM : self.count - 1]

    def begin(self) -> None:
        if not self.seconds:
            self._reserved_mb(start=True)
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
        if len(self.seconds) == 1:
            self.first_seconds = time.perf_counter() - (self.loading or self._began)
        self.peak_mb = max(self.peak_mb, self._reserved_mb() - self._weights_mb)

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

    def figures(self, workload: dict[str, Any], rate: float) -> dict[str, Any]:
        """Return the results. rate: matrix rate in TFLOP/s."""
        median = statistics.median(self.timed)
        shares = {"matrix_share": round(workload["tflop"] / rate / median, 4)}
        if "busy_seconds" in self.kernels:
            shares["busy_share"] = round(self.kernels["busy_seconds"] / median, 3)
        return {
            "seconds": {"min": round(min(self.timed), 4), "median": round(median, 4), "max": round(max(self.timed), 4)},
            "first_seconds": round(self.first_seconds, 2),
            "repetitions": len(self.timed),
            "tokens_per_s": round(workload["tokens"] / median),
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
