"""The benchmark of one GPU, tried on a CPU: results, limits and failures of its parts."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.benchmarks import train_step
from tests.benchmarks.gpu import __main__ as command
from tests.benchmarks.gpu import limits, setup, steps

CPU = ["--device", "cpu", "--size", "tiny"]


@pytest.fixture
def benchmark(tmp_path, monkeypatch, capsys):
    """Run the command in this process, and return its results."""
    for name, value in setup.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "gpu.json"

    def run(*words: str) -> dict[str, Any]:
        command.main([*CPU, "--json", "--folder", str(tmp_path), "--out", str(out), *words])
        results = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert results == json.loads(out.read_text())
        return results

    return run


@pytest.fixture
def replace(monkeypatch):
    """Replace a part by a function of its report."""

    def part(name: str, function) -> None:
        run = SimpleNamespace(run=lambda setup, report: function(report))
        monkeypatch.setitem(sys.modules, f"tests.benchmarks.gpu.{name}", run)

    return part


@pytest.mark.timeout(600)
def test_a_trial_on_a_cpu_measures_rounding_and_finds_the_served_adapter(benchmark):
    results = benchmark("--parts", "served", "exact")
    assert {part["status"] for part in results["parts"].values()} == {"complete"}
    assert results["versions"]["torch"]
    assert results["commit"]
    engine = results["parts"]["served"]["result"]["engines"]["embedded"]
    for gap in (engine["after_swap"], engine["after_release"]):
        assert gap["mean"] < 1e-5 < 1e-2 < gap["stale_mean"]
    assert set(engine["tokens_per_s"]) == {"4", "8"}
    sides = results["parts"]["exact"]["result"]["sides"]
    assert sides["ours"]["float32"]["gradient"] < 1e-5
    for dtype, eps in (("bfloat16", 2**-8), ("float16", 2**-11)):
        for side in ("ours", "padded"):  # a few roundings, and as many as without the trie
            assert eps / 100 < sides[side][dtype]["gradient"] < 30 * eps


def test_a_part_ends_at_its_limit_and_the_next_one_runs(benchmark, replace, monkeypatch):
    def sleeps(report: Any) -> None:
        report.update(measured=1)
        time.sleep(600)

    def fails(report: Any) -> None:
        report.update(measured=2)
        raise ValueError("no such kernel\nbeside other lines")

    monkeypatch.setattr(command, "LEAST", 0.1)
    monkeypatch.setattr(command, "CPU_FACTOR", 0.01)
    monkeypatch.setattr(command, "usable", lambda device: True)  # its imports may take longer than these limits
    replace("steps", sleeps)
    replace("quickstart", fails)
    replace("served", lambda report: report.update(measured=3))
    parts = benchmark("--parts", "steps", "quickstart", "served")["parts"]
    assert [part["status"] for part in parts.values()] == [
        "incomplete: the time limit of 1 s was reached",
        "failed: ValueError: no such kernel",
        "complete",
    ]
    assert [part["result"]["measured"] for part in parts.values()] == [1, 2, 3]
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_killed_run_resumes_after_the_part_in_which_it_ended(benchmark, replace, tmp_path):
    class Killed(BaseException):
        pass

    def killed(report: Any) -> None:
        report.update(measured=2)
        raise Killed

    replace("steps", lambda report: report.update(measured=1))
    replace("quickstart", killed)
    replace("served", lambda report: report.update(measured=3))
    with pytest.raises(Killed):
        benchmark("--parts", "steps", "quickstart", "served")
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["quickstart"]["status"] == "running"
    parts = benchmark("--parts", "steps", "quickstart", "served", "--resume")["parts"]
    assert [part["status"] for part in parts.values()] == [
        "complete",
        "failed: the process ended during this part",
        "complete",
    ]


def test_a_part_that_does_not_heed_its_limit_is_left_behind(monkeypatch):
    monkeypatch.setattr(limits, "GRACE", 0.1)
    stuck = threading.Event()
    with limits.limit(0.1, stuck.set):
        try:
            time.sleep(60)
        except limits.TimeUp:  # as in code that takes any exception for its own
            assert stuck.wait(60)


def test_skipped_parts_alone_are_a_failure(benchmark):
    with pytest.raises(SystemExit, match="nothing was measured"):
        benchmark("--parts", "exact", "--minutes", "0.01")


def test_micro_batches_are_halved_until_they_fit(monkeypatch):
    import torch

    tried = []

    class Trl:
        def __init__(self, base_dir, spec, episodes, rows, scratch):
            self.rows = rows

        def train(self, count, meter):
            tried.append(self.rows)
            if self.rows > 2:
                raise torch.OutOfMemoryError

    monkeypatch.setattr(steps, "Trl", Trl)
    given = SimpleNamespace(base_dir=None, folder=None, step_model=lambda: None)
    with steps.load_trl(given, steps.Meter("cpu", 1)) as take:  # type: ignore[arg-type]
        take([])
    assert tried == [8, 4, 2]


def test_kernels_are_counted_and_concurrent_ones_are_busy_once():
    from torch.autograd import DeviceType

    def event(name: str, start: float, end: float, device=DeviceType.CUDA, annotation=False) -> Any:
        interval = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=interval, device_type=device, is_user_annotation=annotation)

    events = [
        event("gemm", 0, 10e3),
        event("norm", 5e3, 20e3),
        event("Memcpy DtoH (Device -> Pageable)", 30e3, 40e3),
        event("Optimizer.step", 0, 90e3, annotation=True),
        event("cudaGraphLaunch", 0, 90e3, DeviceType.CPU),
    ]
    assert steps.activity(events, "cuda") == {
        "kernels": 2,
        "host_reads": 1,
        "graph_launches": 1,
        "busy_seconds": 0.03,
    }


def test_linear_weights_are_those_of_the_model(tmp_path):
    import torch

    given = setup.Setup("tiny", "cpu", 1, tmp_path, None)
    model = train_step.Plain(given.base_dir, given.step_model()).model.get_base_model()
    layers = (getattr(module, "base_layer", None) for module in model.modules())
    linear = [layer.weight.numel() for layer in layers if isinstance(layer, torch.nn.Linear)]
    assert sum(linear) == given.linear_weights()


def test_mistakes_are_explained():
    with pytest.raises(SystemExit, match="--size qwen3: takes hours on a CPU"):
        command.main(CPU[:2])
    with pytest.raises(SystemExit, match="--vllm-python /no/python: there is no"):
        command.main([*CPU, "--vllm-python", "/no/python"])
