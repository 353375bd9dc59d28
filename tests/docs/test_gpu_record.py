"""The page of GPU measurements: its tables from a record, and the trials that it refuses."""

from __future__ import annotations

import io
import json
import sys

import pytest

from docs import generated, gpu

STEP = {"seconds": {"min": 0.1, "median": 0.125, "max": 0.2}, "tokens_per_s": 111360, "peak_mb": 2500.0}
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
        "train_b": {
            "status": "complete",
            "result": {
                "sides": {"ours_flex": STEP, "trl_tree": STEP},
                "trl_tree_kernel": "flash-attn3",
                "skipped_sides": {"trl": "OutOfMemoryError: 80 GB"},
                "clocks": {"sm_clock_mhz": "1755", "sm_clock_max_mhz": "1980"},
            },
        },
        "generate": {"status": "incomplete: the time limit of 170 s was reached", "result": {}},
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
    assert "NVIDIA T (80.0 GB, driver 550.1, CUDA 12.8, SM clock 1755 of 1980 MHz)" in text
    assert "| (b) | Espalier, FlexAttention | 0.125 (0.100 to 0.200) | 111,360 | 2.50 GB |" in text
    assert "| (b) | TRL `AsyncGRPOTrainer`, flash-attn3 |" in text
    assert "- `train_b`, trl: OutOfMemoryError: 80 GB" in text
    assert "- `generate`: incomplete: the time limit of 170 s was reached" in text


@pytest.mark.parametrize("changed", [{"device": "cpu"}, {"size": "tiny"}])
def test_trials_are_not_recorded(page, monkeypatch, changed):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(RESULTS | changed)))
    with pytest.raises(SystemExit, match="a trial on a CPU is not recorded"):
        gpu.main(["add"])
    assert not gpu.RECORD.exists()


def test_the_readme_states_the_recorded_step():
    recorded = json.loads(gpu.RECORD.read_text(encoding="utf-8"))
    assert gpu.summary(recorded) in (gpu.DOCS.parent / "README.md").read_text(encoding="utf-8")
