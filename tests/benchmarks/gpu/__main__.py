"""A GPU in ten minutes: what Espalier does on one GPU, offline, compared with its peers.

    python -m tests.benchmarks.gpu [--json] [--out gpu.json] [--minutes 9] [--vllm-python PYTHON]
    python -m tests.benchmarks.gpu --device cpu --size tiny     every part that a CPU can run
    python -m tests.benchmarks.gpu --requirements               packages for a folder of wheels

    model      weights with the dimensions of Qwen3-0.6B, drawn at random
    train_*    gradient steps of GRPO on the workloads of `train_step`: prefix trie (FlexAttention and scaled
               dot-product attention), padded rows, TRL's GRPOTrainer, TRL's AsyncGRPOTrainer with prefix trees
    exact      log-probabilities and gradients in bfloat16 and float16 against float32
    generate   sampled tokens per second and adapter swaps: embedded engine and vLLM
    overlap    rounds of a small run, of which training and collection overlap

Each part is a process of its own with a time limit, and writes its result after each measurement: a crash, a full
memory or a time limit loses only what follows in that part. `--out` is rewritten after each part. A part or a side that
cannot run is skipped, with its reason. The exit code is 1 if no part besides `model` has a measurement, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.parts import PARTS, Part, run_part
from tests.benchmarks.gpu.requirements import requirements

LEAST = 15.0
"""Seconds without which a part is not started."""
CPU_FACTOR = 3.0
"""Factor of the time limits of parts on a CPU."""


def main(words: list[str] | None = None) -> None:
    options = arguments(words)
    if options.requirements:
        print("\n".join(requirements()))
        return
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if options.json else print
    began = time.monotonic()
    results = describe(options)
    selected = [part for part in PARTS if wanted(part, options)]
    with scratch(options.keep) as folder:
        settings = {
            "size": options.size,
            "device": results["device"],
            "repeat": options.repeat,
            "folder": str(folder),
            "workloads": options.workload,
            "vllm_python": results["vllm_python"],
        }
        factor = CPU_FACTOR if results["device"] == "cpu" else 1.0
        for part in selected:
            left = options.minutes * 60 - (time.monotonic() - began)
            model = results["parts"].get("model", {"status": "complete"})
            if model["status"] != "complete":
                result = {"status": "skipped: there are no weights", "seconds": 0.0, "result": {}}
            elif left < LEAST:
                result = {"status": f"skipped: --minutes {options.minutes:g} are over", "seconds": 0.0, "result": {}}
            else:
                result = run_part(part, settings, folder, min(part.seconds * factor, left))
            results["parts"][part.name] = result
            results["seconds"] = round(time.monotonic() - began, 1)
            if options.out:
                write(options.out, results)
            say(line(part.name, result))
    del results["vllm_python"]
    if options.out:
        write(options.out, results)
    if options.json:
        print(json.dumps(results))
    if not measured(results["parts"]):
        sys.exit("no part was measured: all were skipped or failed")


def measured(parts: dict[str, Any]) -> bool:
    """Return True if a part besides `model` has a measurement. A part that was cut short has those before its end."""
    results = [part["result"] for name, part in parts.items() if name != "model"]
    return any(
        any(result.get("sides", {}).values())
        or any(result.get("workloads", {}).values())
        or bool(result.get("stage_seconds"))
        for result in results
    )


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Return the head of the results. Exits if the device does not exist."""
    try:
        import torch
    except ImportError as error:
        sys.exit(
            f"torch is not installed ({error}); python -m tests.benchmarks.gpu --requirements lists what is needed"
        )
    from tests.benchmarks.gpu import machine

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--device cuda: torch {torch.__version__} sees no CUDA device; expected a GPU, or --device cpu")
    if device == "cpu" and options.size != "tiny":
        sys.exit(f"--size {options.size}: takes hours on a CPU; set --size tiny, or run on a machine with a GPU")
    python = machine.find_vllm(options.vllm_python)
    if python is not None and not Path(python).is_file():
        sys.exit(f"--vllm-python {python}: there is no such file; expected the Python of an environment with vLLM")
    found = {"size": options.size, "minutes": options.minutes, "repeat": options.repeat, "seconds": 0.0}
    return {
        **found,
        **machine.describe(device),
        "vllm_python": python,
        "vllm": machine.vllm_version(python),
        "parts": {},
    }


def wanted(part: Part, options: argparse.Namespace) -> bool:
    """Return True for a part to run."""
    if part.name.startswith("train_"):
        return "train" in options.parts and part.name.removeprefix("train_") in options.workload
    return part.name == "model" or part.name in options.parts


@contextlib.contextmanager
def scratch(keep: Path | None) -> Iterator[Path]:
    """Return a folder for weights, requests and logs."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="espalier-gpu-") as temporary:
        yield Path(temporary)


def write(path: Path, results: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def line(name: str, part: dict[str, Any]) -> str:
    """Return a line on a part: its status, what it skipped, and its main figures."""
    result = part["result"]
    text = f"{name}: {part['status']} ({part['seconds']:.0f} s)"
    for side, figures in result.get("sides", {}).items():
        shown = {key: value for key, value in figures.items() if not isinstance(value, dict)}
        median = figures["seconds"]["median"] if isinstance(figures.get("seconds"), dict) else None
        text += f"\n  {side}: " + ", ".join(
            [*([f"{median} s"] if median is not None else []), *(f"{key} {value}" for key, value in shown.items())]
        )
    for workload, sides in result.get("workloads", {}).items():
        for side, figures in sides.items():
            text += f"\n  {workload} {side}: " + ", ".join(f"{key} {value:.2g}" for key, value in figures.items())
    if "logprob_difference" in result:
        difference = result["logprob_difference"]
        text += f"\n  log-probabilities of vLLM and the embedded engine: {difference['mean']:.2g} nats apart on average"
    if "stage_seconds" in result:
        text += "\n  seconds: " + ", ".join(f"{label} {value}" for label, value in result["stage_seconds"].items())
        text += "\n  of these beside a training: " + ", ".join(
            f"{label} {value}" for label, value in result["overlapped_seconds"].items()
        )
    for side, cause in result.get("skipped_sides", {}).items():
        text += f"\n  {side} is skipped: {cause}"
    return text


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of the output")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file, rewritten after each part")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all parts together (9)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if any")
    parser.add_argument("--size", choices=("qwen3", "tiny"), default="qwen3", help="dimensions of Qwen3-0.6B, or tiny")
    names = ("train", "exact", "generate", "overlap")
    parser.add_argument("--parts", nargs="+", choices=names, default=list(names), help="parts to run (all)")
    parser.add_argument("--workload", nargs="+", choices="abcd", help="workloads (all; with --size tiny: b)")
    parser.add_argument("--repeat", type=int, help="repetitions, of which the median counts (5; with --size tiny: 2)")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="new folder for weights and logs, which stays")
    parser.add_argument("--requirements", action="store_true", help="print the packages that are needed, and exit")
    options = parser.parse_args(words)
    tiny = options.size == "tiny"
    options.workload = options.workload or (["b"] if tiny else list("abcd"))
    options.repeat = options.repeat if options.repeat is not None else (2 if tiny else 5)
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: expected more than 0")
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: at least 1")
    if options.keep is not None and options.keep.exists():
        parser.error(f"--keep {options.keep}: exists already; name a new folder")
    return options


if __name__ == "__main__":
    main()
