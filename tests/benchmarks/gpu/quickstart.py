"""The quickstart as a user starts it, with the embedded engine, then with vLLM: each a command with a root of its own.

While a run goes on, its record (`flows.history.records`) has the stages that have ended; the most memory of the GPU is
that since the stage before, so the results of a run that is cut short are those of its finished stages. The first run
converts the weights, which the second finds.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu import machine
from tests.benchmarks.gpu.limits import session
from tests.benchmarks.gpu.report import Report
from tests.benchmarks.gpu.setup import GPU_MEMORY, Setup

INTERVAL = 0.5
"""Seconds between two readings of record and memory."""
LAST_LINES = 6


def run(setup: Setup, report: Report) -> None:
    report.update(dtype=setup.dtype, runs={})
    measure(setup, report, "embedded", [])
    if setup.vllm_python is None:
        report.skip("vllm", machine.NO_VLLM)
    else:
        measure(setup, report, "vllm", vllm_overrides(setup))


def vllm_overrides(setup: Setup) -> list[str]:
    return ["inference=vllm", f"inference.python={setup.vllm_python}", f"inference.gpu_memory={GPU_MEMORY}"]


def measure(setup: Setup, report: Report, name: str, overrides: list[str]) -> None:
    """Run the quickstart. Report its stages as they end."""
    root = setup.root(f"quickstart-{name}")
    words = [setup.shape.experiment, f"root={root}", f"model.dtype={setup.dtype}", f"model.device={setup.device}"]
    figures: dict[str, Any] = {"stages": {}, "sampler_gap": {}}
    report.result["runs"][name] = figures
    before = most = machine.used_mb() or 0.0  # of this process
    began = time.monotonic()
    with session(["-m", "flows.run", *words, *overrides], root / "output.log", cwd=machine.CODE) as process:
        while True:
            ended = process.poll() is not None
            most = max(most, machine.used_mb() or 0.0)
            figures["seconds"] = round(time.monotonic() - began, 1)
            for stage in stages(root):
                if stage["label"] not in figures["stages"]:
                    figures["stages"][stage["label"]] = [stage["seconds"], round(most - before)]
                    figures.setdefault("first_stage_seconds", figures["seconds"])
                    figures["sampler_gap"] |= gap(root, stage)
                    most = before
                    report.update()
            if ended:
                break
            time.sleep(INTERVAL)
    if process.returncode:
        return report.skip(name, f"exit code {process.returncode}: {last_lines(root / 'output.log')}")
    result = json.loads((root / "output.log").read_text().splitlines()[-1])
    figures |= {key: result[key] for key in ("success_start", "success_sft", "success", "stage_seconds")}
    return report.update()


def stages(root: Path) -> list[dict[str, Any]]:
    """Return the finished stages of the only run below a root."""
    for record in (root / "records").glob("*.json"):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(record.read_text())["stages"]
    return []


def gap(root: Path, stage: dict[str, Any]) -> dict[str, float]:
    """Return the gap between sampler and trainer that a training measured, by its label."""
    manifest = root / "artifacts" / stage["key"] / "manifest.json"
    if stage["kind"] != "checkpoint" or not manifest.is_file():
        return {}
    metrics = json.loads(manifest.read_text()).get("metrics", {})
    return {stage["label"]: metrics["sampler_gap"]} if "sampler_gap" in metrics else {}


def last_lines(log: Path) -> str:
    """Return the last lines of a log, on one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(line[:300] for line in lines[-LAST_LINES:])
