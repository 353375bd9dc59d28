"""The quickstart's path with inference=vllm, in short form, on a real server: `make test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_smollm2 import SHORT

CODE = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]


def test_the_quickstart_on_vllm_starts_one_server(tmp_path):
    server = [f"inference.python={os.environ['VLLM_PYTHON']}", "inference.start_timeout=3000"]
    if url := os.environ.get("VLLM_URL"):
        server = [f"inference.urls=[{url}]"]
    options = [f"root={tmp_path}", *SHORT, "deploy=export", "inference=vllm", *server]
    command = [sys.executable, "-m", "flows.run", "+experiment=quickstart", *options]
    done = subprocess.run(command, cwd=CODE, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    assert set(json.loads(done.stdout.splitlines()[-1])["stages"].values()) == {"ran"}
    assert done.stderr.count("vLLM is up") == (0 if url else 1)
    made = {}
    for file in tmp_path.glob("artifacts/**/manifest.json"):
        manifest = json.loads(file.read_text())
        made.setdefault(manifest["stage"], []).append(manifest["metrics"])
    [grpo] = [metrics for metrics in made["train"] if "clip_fraction" in metrics]
    print(f"kl_sampler {grpo['kl_sampler']:.1e}, clip_fraction {grpo['clip_fraction']}")
    assert 0 <= grpo["kl_sampler"] < 1e-6
    again = subprocess.run(command, cwd=CODE, capture_output=True, text=True, timeout=600, check=False)
    assert set(json.loads(again.stdout.splitlines()[-1])["stages"].values()) == {"cached"}
    assert "vLLM starts" not in again.stderr
