"""A quarter of an hour on one GPU: what Espalier does there, offline, compared with its peers.

    python -m tests.benchmarks.gpu [--json] [--out gpu.json] [--minutes M] [--vllm-python PYTHON]
    python -m tests.benchmarks.gpu --device cpu --size tiny --json     every part that a CPU can run

    steps        gradient steps of GRPO on the workloads of `train_step`, default settings, also as CUDA graphs; TRL,
                 TRL with Liger kernels
    quickstart   the quickstart with the embedded engine, then with vLLM
    served       engines beside the trainer: refusals, log-probabilities of known tokens after swaps, tokens per second
    rounds       rounds per hour with vLLM, and of TRL with vLLM colocated
    exact        log-probabilities and gradients in bfloat16 and float16 against float32

The parts run in this order in one process, which imports and loads once. `--out` is rewritten after each measurement,
so a run that is killed keeps what it has; `--resume` continues with the part after the one that ended it. A part has a
time limit, to which time is added that earlier parts left; at its end the next one begins (`limits`). A part, or a side
of one, that cannot run is skipped, with its reason. The exit code is 1 if nothing was measured, else 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu import limits
from tests.benchmarks.gpu.report import Report, Results, reason
from tests.benchmarks.gpu.setup import SIZES, Setup, environment, free

PARTS = {"steps": 110.0, "quickstart": 180.0, "served": 140.0, "rounds": 110.0, "exact": 60.0}
"""Time limits on a GPU in seconds, in order of value."""
CPU_FACTOR = 4.0
"""Factor of the limits of parts on a CPU."""
MINUTES = {"cuda": 9.8, "cpu": 19.0}
"""Time limits of all parts together."""
LEAST = 10.0
"""Seconds without which a part is not started."""


def main(words: list[str] | None = None) -> None:
    options = arguments(words)
    temporary = options.folder is None
    folder = Path(tempfile.mkdtemp(prefix="espalier-gpu-")) if temporary else options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment(folder))  # before torch
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore")
    out = (options.out or folder / "gpu.json").absolute()
    setup = setup_of(options, folder)
    options.minutes = options.minutes or MINUTES[setup.device]
    results = Results.resumed(out) if options.resume else Results(out, describe(setup, options))
    again = [*(sys.argv[1:] if words is None else words), "--folder", str(folder), "--out", str(out)]
    due = 0.0
    try:
        for name in [name for name in options.parts if name not in results.parts]:
            due += PARTS[name] * (1 if setup.device == "cuda" else CPU_FACTOR)
            run_part(name, setup, results, due, options.minutes * 60, again)
            print(summary(name, results.parts[name]), file=sys.stderr, flush=True)
    finally:
        setup.closing.close()
        results.write()
        if options.json:
            print(json.dumps(results.content), flush=True)
    if temporary and not options.resume:
        shutil.rmtree(folder, ignore_errors=True)
    if not any(part["result"] for part in results.parts.values()):
        sys.exit("nothing was measured: all parts were skipped or failed")


def run_part(name: str, setup: Setup, results: Results, due: float, total: float, again: list[str]) -> None:
    """Run a part, which ends `due` seconds after the process began, and at most `total`. again: command line for a
    process that resumes."""
    seconds = min(due, total) - results.elapsed
    report = Report(results, name)
    if seconds < LEAST:
        report.end(f"skipped: {max(seconds, 0):.0f} s are left of its time")
        return

    def stuck() -> None:
        report.end(f"failed: it did not return {limits.GRACE:.0f} s after its limit of {seconds:.0f} s")
        resume()

    def resume() -> None:
        limits.restart([*again, "--minutes", f"{max(total - results.elapsed, 1) / 60:.2f}"])

    try:
        with limits.limit(seconds, stuck):
            importlib.import_module(f"tests.benchmarks.gpu.{name}").run(setup, report)
    except limits.TimeUp:
        report.end(f"incomplete: the time limit of {seconds:.0f} s was reached")
    except Exception as error:  # noqa: BLE001  the other parts are still measured
        report.end(f"failed: {reason(name, error)}")
    else:
        report.end("complete")
    if not usable(setup.device):
        resume()


def usable(device: str) -> bool:
    """Return False if an error has made the GPU unusable for this process."""
    try:
        free()
        if device == "cuda":
            import torch

            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def setup_of(options: argparse.Namespace, folder: Path) -> Setup:
    """Return the settings. Exits if the device or the interpreter does not exist."""
    import torch

    from tests.benchmarks.gpu import machine

    available = torch.cuda.is_available()
    device = ("cuda" if available else "cpu") if options.device == "auto" else options.device
    if device == "cuda" and not available:
        sys.exit(f"--device cuda: torch {torch.__version__} sees no CUDA device; expected a GPU, or --device cpu")
    if device == "cpu" and options.size != "tiny":
        sys.exit(f"--size {options.size}: takes hours on a CPU; set --size tiny, or run on a machine with a GPU")
    python = machine.find_vllm(options.vllm_python)
    if python is not None and not Path(python).is_file():
        sys.exit(f"--vllm-python {python}: there is no such file; expected the Python of an environment with vLLM")
    return Setup(options.size, device, options.repeat, folder, python)


def describe(setup: Setup, options: argparse.Namespace) -> dict[str, Any]:
    """Return the head of the results."""
    from tests.benchmarks.gpu import machine

    site = machine.vllm_site(setup.vllm_python)
    head = {"size": setup.size, "minutes": options.minutes, "repeat": setup.repeat, "vllm": site and site[0]}
    return {**head, **machine.describe(setup.device)}


def summary(name: str, part: dict[str, Any]) -> str:
    """Return a line on a part, and one for each measurement that was skipped."""
    lines = [f"{name}: {part['status']} ({part['seconds']:.0f} s)"]
    lines += [f"  {what} is skipped: {cause}" for what, cause in part["result"].get("skipped", {}).items()]
    return "\n".join(lines)


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of the output")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file, rewritten after each measurement")
    parser.add_argument("--resume", action="store_true", help="continue the run whose results are in --out")
    parser.add_argument("--minutes", type=float, help="time limit of all parts together (9.8; on a CPU 19)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if any")
    parser.add_argument("--size", choices=SIZES, default="qwen3", help="dimensions of Qwen3-0.6B, or tiny")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (all)")
    parser.add_argument("--repeat", type=int, default=5, help="timed steps of each side (5)")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--folder", type=Path, help="folder for weights, caches and logs, which stays")
    options = parser.parse_args(words)
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: expected more than 0")
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: at least 1")
    if options.resume and options.out is None:
        parser.error("--resume: --out names no file with the results to continue")
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the results are printed, and processes end
    main()
