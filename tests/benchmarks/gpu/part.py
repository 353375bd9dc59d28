"""Process of one part: `python -m tests.benchmarks.gpu.part REQUEST`."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.setup import Report, Setup, write_model


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore")
    setup = Setup(
        size=request["size"],
        device=request["device"],
        repeat=request["repeat"],
        folder=Path(request["folder"]),
        workloads=request["workloads"],
        vllm_python=request["vllm_python"],
        deadline=time.monotonic() + request["seconds"],
    )
    report = Report(Path(request["out"]))
    perform(request["part"], setup, report)
    if setup.device == "cuda":
        from tests.benchmarks.gpu.machine import clocks

        report.update(clocks=clocks())


def perform(part: str, setup: Setup, report: Report) -> None:
    """Run a part."""
    if part == "model":
        report.update(**write_model(setup))
    elif part.startswith("train_"):
        from tests.benchmarks.gpu import train

        train.run(setup, report, part.removeprefix("train_"))
    else:
        from tests.benchmarks.gpu import exact, generate, overlapped

        modules: dict[str, Any] = {"exact": exact, "generate": generate, "overlap": overlapped}
        modules[part].run(setup, report)


if __name__ == "__main__":
    main()
