"""The benchmark of one GPU, tried on a CPU: results, limits and failures of its parts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.benchmarks.gpu import __main__ as command
from tests.benchmarks.gpu import parts, train
from tests.benchmarks.gpu.part import perform
from tests.benchmarks.gpu.requirements import requirements
from tests.benchmarks.gpu.setup import Report, Setup


def in_this_process(part: parts.Part, settings: dict[str, Any], folder: Path, limit: float) -> dict[str, Any]:
    """Run a part as `parts.run_part` does, without a process of its own."""
    report = Report(folder / f"{part.name}.json")
    settings = settings | {"folder": Path(settings["folder"]), "deadline": time.monotonic() + limit}
    perform(part.name, Setup(**settings), report)
    return {"status": "complete", "seconds": 0.0, "result": json.loads(report.path.read_text())}


@pytest.mark.timeout(600)
def test_a_trial_on_a_cpu_runs_its_parts_and_measures_the_rounding_of_each_side(tmp_path, monkeypatch, capsys):
    """The first part runs in a process of its own, as all do."""
    out = tmp_path / "gpu.json"
    run_part = parts.run_part
    monkeypatch.setattr(
        command, "run_part", lambda part, *rest: (run_part if part.name == "model" else in_this_process)(part, *rest)
    )
    options = ["--device", "cpu", "--size", "tiny", "--parts", "exact", "generate", "overlap", "--minutes", "9"]
    command.main([*options, "--json", "--out", str(out)])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results == json.loads(out.read_text())
    assert {name: part["status"] for name, part in results["parts"].items()} == {
        "model": "complete",
        "exact": "complete",
        "generate": "complete",
        "overlap": "complete",
    }
    for side in ("embedded", "transformers"):
        assert results["parts"]["generate"]["result"]["sides"][side]["sampled"] == 8 * 8
    assert results["parts"]["overlap"]["result"]["trainings"] == 2
    assert results["versions"]["torch"]
    assert results["commit"]
    exact = results["parts"]["exact"]["result"]
    assert "FlexAttention" in exact["skipped_sides"]["ours_flex"]
    sides = exact["workloads"]["b"]
    for side in ("ours_blocks", "ours_sdpa"):
        assert sides[f"{side}_float32"]["gradient"] < 1e-5
        for dtype, eps in (("bfloat16", 2**-8), ("float16", 2**-11)):
            for form in (side, "padded"):  # a few roundings, and as many as without the trie
                assert eps / 100 < sides[f"{form}_{dtype}"]["gradient"] < 30 * eps


def test_a_part_that_fails_says_why_and_keeps_what_it_reported(tmp_path):
    settings = {
        "size": "tiny",
        "device": "cpu",
        "repeat": 1,
        "folder": str(tmp_path),
        "workloads": [],
        "vllm_python": "",
    }
    (tmp_path / "nonsense.json").write_text('{"before": 1}')
    done = parts.run_part(parts.Part("nonsense", 60), settings, tmp_path, 300)
    assert done["status"].startswith("failed (exit code 1)")
    assert done["result"] == {"before": 1}


NOTHING = {"result": {}}
ALL_SIDES_SKIPPED = {"result": {"sides": {}, "skipped_sides": {"trl": "is not installed"}}}
SOME = {"result": {"workloads": {"b": {"padded": {}}}}}


def test_results_without_a_measurement_are_a_failure():
    assert not command.measured({"model": SOME, "exact": NOTHING})
    assert not command.measured({"model": SOME, "exact": NOTHING, "train_a": ALL_SIDES_SKIPPED})
    assert not command.measured({"model": NOTHING})
    assert command.measured({"model": NOTHING, "exact": SOME, "train_a": NOTHING})


def test_skipped_parts_alone_are_a_failure(capsys):
    with pytest.raises(SystemExit, match="no part was measured"):
        command.main(["--device", "cpu", "--size", "tiny", "--parts", "exact", "--minutes", "0.01", "--json"])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(part["status"].startswith("skipped") for part in results["parts"].values())


def test_a_part_ends_at_its_limit_with_its_processes(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        assert parts._run(["sh", "-c", "sleep 1000 & echo $!; wait"], log, {}, 2) is None
    pid = int((tmp_path / "log").read_text())
    until = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the child of the part is still alive"
        time.sleep(0.1)


def test_micro_batches_are_halved_until_they_fit():
    import torch

    tried = []

    def make(rows):
        tried.append(rows)
        if rows > 2:
            raise torch.OutOfMemoryError
        return lambda: 0.0

    train.warmed_up(make)
    assert tried == [8, 4, 2]


def test_ratios_are_those_to_the_fastest_of_ours():
    measured = {
        side: {"seconds": {"median": seconds}, "peak_mb": peak}
        for side, seconds, peak in (("ours_sdpa", 2.0, 300.0), ("ours_flex", 1.0, 100.0), ("trl", 4.0, 250.0))
    }
    assert train.ratios(measured) == {
        "ours_sdpa_time": 2.0,
        "ours_sdpa_memory": 3.0,
        "trl_time": 4.0,
        "trl_memory": 2.5,
    }


def test_the_requirements_are_locked():
    lines = requirements()
    assert all("==" in line for line in lines)
    assert any(line.startswith("trl==1.16") for line in lines)


def test_mistakes_are_explained():
    cpu = ["--device", "cpu"]
    with pytest.raises(SystemExit, match="--size qwen3: takes hours on a CPU"):
        command.main(cpu)
    with pytest.raises(SystemExit, match="--vllm-python /no/python: there is no"):
        command.main([*cpu, "--size", "tiny", "--vllm-python", "/no/python"])
