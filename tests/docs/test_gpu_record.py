"""The page of GPU measurements: its tables from a record, and the trials that it refuses."""

from __future__ import annotations

import io
import json
import sys

import pytest

from docs import generated, gpu

STEP = {
    "label": "Espalier",
    "seconds": {"min": 0.1, "median": 0.125, "max": 0.2},
    "first_seconds": 12.5,
    "tokens_per_s": 111360,
    "peak_mb": 2500.0,
    "kernels": 1700,
    "busy_share": 0.91,
    "matrix_share": 0.36,
}
TRL = {
    "label": "TRL `GRPOTrainer`",
    "seconds": {"min": 0.25, "median": 0.25, "max": 0.25},
    "tokens_per_s": 55680,
    "peak_mb": 5000.0,
}
GAP = {"tokens": 64, "load_seconds": 0.1, "mean": 0.02, "max": 0.1, "stale_mean": 0.5}
RESULTS = {
    "size": "qwen3",
    "device": "cuda",
    "gpu": {"name": "NVIDIA T", "memory_gb": 80.0, "driver": "550.1", "cuda": "12.8"},
    "cpu": "16 × CPU",
    "versions": {"torch": "2.13.0"},
    "vllm": "vllm 0.32.0",
    "commit": "abc",
    "date": "2026-11-26T00:00:00+00:00",
    "seconds": 480.0,
    "parts": {
        "steps": {
            "status": "complete",
            "result": {
                "dtype": "bfloat16",
                "matrix_tflops": 791.2,
                "workloads": {"b": {"sides": {"ours": STEP, "trl": TRL}}},
                "skipped": {"trl_liger (b)": "OutOfMemoryError: 80 GB"},
                "clocks": {"sm_clock_mhz": "1755", "sm_clock_max_mhz": "1980"},
            },
        },
        "quickstart": {
            "status": "incomplete: the time limit of 180 s was reached",
            "result": {
                "dtype": "bfloat16",
                "runs": {
                    "embedded": {
                        "stages": {"evaluate[start]": [4.0, 2100], "train[1]": [5.5, 6000]},
                        "sampler_gap": {"train[1]": 2.5e-3},
                        "seconds": 90.0,
                        "first_stage_seconds": 14.0,
                        "success": 0.8,
                    },
                    "vllm": {
                        "stages": {"evaluate[start]": [2.0, 18000]},
                        "sampler_gap": {},
                        "seconds": 80.0,
                        "first_stage_seconds": 60.0,
                    },
                },
            },
        },
        "served": {
            "status": "complete",
            "result": {
                "refused_float32": "model.dtype = float32: not on a GPU",
                "engines": {"vllm": {"start_seconds": 50.0, "tokens_per_s": {"64": 6100}, "after_swap": GAP}},
            },
        },
        "rounds": {
            "status": "complete",
            "result": {
                "prompts": 16,
                "episodes": 128,
                "sampled_tokens": 128,
                "sides": {"trl": {"label": "TRL", "first_seconds": 70.0, "rounds_per_hour": 1200}},
            },
        },
        "exact": {"status": "failed: ValueError: x", "result": {}},
    },
}


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "RECORD", tmp_path / "gpu.json")
    monkeypatch.setattr(generated, "DOCS", tmp_path)
    (tmp_path / "results").mkdir()
    path = tmp_path / "results" / "gpu.md"
    path.write_text("before\n<!-- gpu -->\n<!-- /gpu -->\nafter\n")
    return path


def test_without_a_record_the_page_gives_the_command(page):
    gpu.main([])
    assert "Nothing has been measured" in page.read_text()
    assert "python -m tests.benchmarks.gpu --json | python -m docs.gpu add" in page.read_text()


def test_the_page_shows_what_was_measured_and_what_was_not(page, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"noise\n{json.dumps(RESULTS)}\n"))
    gpu.main(["add"])
    text = page.read_text()
    for shown in (
        "NVIDIA T (80.0 GB, driver 550.1, CUDA 12.8, SM clock 1755 of 1980 MHz)",
        "| (b) | Espalier | 0.125 (0.100 to 0.200) | 12.5 | 2.50 GB | 1,700 | 91% | 36% |",
        "| (b) | TRL `GRPOTrainer` | 0.250 (0.250 to 0.250) | – | 5.00 GB | – | – | – |",
        "| `train[1]` | 5.5 s, 6.0 GB, 2.5e-03 | – |",
        "| held-out success | 0.80 | – |",
        "| vLLM | 50 s | 6,100 | 2.0e-02 (5.0e-01) | – |",
        "refused: “model.dtype = float32: not on a GPU”",
        "| TRL | 1,200 | 70 s |",
        "- `steps`, trl_liger (b): OutOfMemoryError: 80 GB",
        "- `quickstart`: incomplete: the time limit of 180 s was reached",
        "- `exact`: failed: ValueError: x",
    ):
        assert shown in text, shown
    assert "0.50 of the time and 0.50 of the memory (Espalier)" in gpu.summary(RESULTS)


@pytest.mark.parametrize("changed", [{"device": "cpu"}, {"size": "tiny"}])
def test_trials_are_not_recorded(page, monkeypatch, changed):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(RESULTS | changed)))
    with pytest.raises(SystemExit, match="a trial on a CPU is not recorded"):
        gpu.main(["add"])
    assert not gpu.RECORD.exists()


def test_the_readme_states_the_recorded_step():
    recorded = json.loads(gpu.RECORD.read_text(encoding="utf-8"))
    assert gpu.summary(recorded) in (gpu.DOCS.parent / "README.md").read_text(encoding="utf-8")
