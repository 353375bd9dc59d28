"""Measurements on one GPU in docs/results/gpu.md, from the record beside it.

python -m tests.benchmarks.gpu --json | python -m docs.gpu add     keep the results of a GPU in place of earlier ones
python -m docs.gpu                                                 write the page
"""

from __future__ import annotations

import json
import sys
from typing import Any

from docs.generated import DOCS, Generated, table

RECORD = DOCS / "results" / "gpu.json"
NOTHING = (
    "Nothing has been measured on a GPU yet. On a machine with one:\n\n"
    "```sh\npython -m tests.benchmarks.gpu --json | python -m docs.gpu add\n```\n"
)
NAMES = {
    "ours": "Espalier",
    "ours_dense": "Espalier, dense mask",
    "padded": "padded rows",
    "embedded": "embedded engine",
    "embedded_graphed": "embedded engine, `model.cuda_graphs=true`",
    "vllm": "vLLM",
}


def main(arguments: list[str]) -> None:
    if arguments not in ([], ["add"]):
        sys.exit(f"{' '.join(arguments)}: expected nothing, or add; usage: python -m docs.gpu [add < RESULTS]")
    if arguments:
        text = sys.stdin.read().strip()
        add(json.loads(text if text.startswith("{") else text.splitlines()[-1]))  # a file, or a command's output
    PAGE.write()


def add(results: dict[str, Any]) -> None:
    """Record the results. Exits if they are not those of a GPU and a model of full size."""
    if results["device"] != "cuda" or results["size"] != "qwen3":
        sys.exit(
            f"device = {results['device']}, size = {results['size']}: expected a GPU and --size qwen3; "
            "a trial on a CPU is not recorded"
        )
    RECORD.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def content() -> str:
    """Return the generated part of the page."""
    if not RECORD.is_file():
        return NOTHING
    results = json.loads(RECORD.read_text(encoding="utf-8"))
    parts = {name: part["result"] for name, part in results["parts"].items()}
    sections = [
        machine(results),
        steps(parts.get("steps", {})),
        quickstart(parts.get("quickstart", {})),
        served(parts.get("served", {})),
        rounds(parts.get("rounds", {})),
        exactness(parts.get("exact", {})),
        missing(results["parts"]),
    ]
    return "\n".join(section for section in sections if section)


def summary(results: dict[str, Any]) -> str:
    """Return the sentence of the README: median steps of workload (b) against TRL's fastest trainer."""
    sides = results["parts"]["steps"]["result"]["workloads"]["b"]["sides"]
    peer = min((sides[name] for name in sides if name.startswith("trl")), key=_median)
    ratios = ", ".join(
        f"{_median(side) / _median(peer):.2f} of the time and {side['peak_mb'] / peer['peak_mb']:.2f} of the memory "
        f"({side['label']})"
        for name, side in sides.items()
        if name.startswith("ours")
    )
    return (
        f"On an {_short(results)}, a GRPO step on episodes of six turns, compared with {peer['label']}, takes {ratios} "
        "([measurements](docs/results/gpu.md))."
    )


def machine(results: dict[str, Any]) -> str:
    """Return a sentence on the machine and the versions."""
    gpu, versions = results["gpu"], ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    clocks = results["parts"].get("steps", {}).get("result", {}).get("clocks") or results.get("clocks_idle") or {}
    clock = f", SM clock {clocks['sm_clock_mhz']} of {clocks['sm_clock_max_mhz']} MHz" if clocks else ""
    served = f"; server {results['vllm']}" if results.get("vllm") else ""
    return (
        f"{gpu['name']} ({gpu['memory_gb']} GB, driver {gpu['driver']}, CUDA {gpu['cuda']}{clock}); {results['cpu']}; "
        f"{versions}{served}. Commit {results['commit']}, {results['date'][:10]}, {results['seconds'] / 60:.1f} "
        "minutes.\n"
    )


def steps(part: dict[str, Any]) -> str:
    """Return the table of gradient steps."""
    rows = []
    for name, workload in sorted(part.get("workloads", {}).items()):
        for side in workload["sides"].values():
            seconds = side["seconds"]
            spread = f"{seconds['median']:.3f} ({seconds['min']:.3f} to {seconds['max']:.3f})"
            first = f"{side['first_seconds']:.1f}" if "first_seconds" in side else "–"
            shares = [f"{side[key]:.0%}" if key in side else "–" for key in ("busy_share", "matrix_share")]
            memory = f"{side['peak_mb'] / 1e3:.2f} GB"
            kernels = f"{side['kernels']:,}" if "kernels" in side else "–"
            rows.append([f"({name})", side["label"], spread, first, memory, kernels, *shares])
    if not rows:
        return ""
    text = "### Gradient steps\n\n"
    if "matrix_tflops" in part:
        text += f"Matrix rate: {part['matrix_tflops']:.0f} TFLOP/s in {part['dtype']}.\n\n"
    head = ["Workload", "Side", "Seconds of a step, median (least to most)", "First step (s)", "Memory", "Kernels"]
    return text + table([*head, "GPU busy", "Share of the matrix rate"], rows)


def quickstart(part: dict[str, Any]) -> str:
    """Return the table of the quickstart's stages."""
    runs = {name: run for name, run in part.get("runs", {}).items() if run.get("stages")}
    if not runs:
        return ""
    labels = list(dict.fromkeys(label for run in runs.values() for label in run["stages"]))
    rows = [
        [f"`{label}`", *(_stage(run["stages"].get(label), run["sampler_gap"].get(label)) for run in runs.values())]
        for label in labels
    ]
    rows.append(["whole command (s)", *(f"{run['seconds']:.0f}" for run in runs.values())])
    rows.append(["first stage done (s)", *(f"{run['first_stage_seconds']:.0f}" for run in runs.values())])
    rows.append(["held-out success", *(f"{run['success']:.2f}" if "success" in run else "–" for run in runs.values())])
    text = f"### The quickstart in {part['dtype']}\n\nSeconds, most memory of the GPU, and `train/sampler_gap`.\n\n"
    return text + table(["Stage", *(NAMES[name] for name in runs)], rows)


def _stage(figures: list[float] | None, gap: float | None) -> str:
    if figures is None:
        return "–"
    measured = "" if gap is None else f", {gap:.1e}"
    return f"{figures[0]:.1f} s, {figures[1] / 1e3:.1f} GB{measured}"


def served(part: dict[str, Any]) -> str:
    """Return the tables of the engines beside the trainer."""
    engines = part.get("engines", {})
    if not engines:
        return ""
    counts = list(dict.fromkeys(count for engine in engines.values() for count in engine["tokens_per_s"]))
    rows = []
    for name, engine in engines.items():
        rates = [f"{engine['tokens_per_s'][count]:,}" if count in engine["tokens_per_s"] else "–" for count in counts]
        gaps = [_gap(engine.get(key)) for key in ("after_swap", "after_release")]
        rows.append([NAMES[name], f"{engine['start_seconds']:.0f} s", *rates, *gaps])
    head = ["Engine", "Start", *(f"Tokens/s, {count} rows" for count in counts)]
    gaps_text = "Log-probabilities of an engine's tokens against the trainer's, mean (with the adapter before), in nats"
    refused = part.get("refused_float32")
    answer = f"refused: “{refused}”" if refused else "not refused"
    return (
        f"### Engines beside the trainer\n\n{gaps_text}.\n\n"
        + table([*head, "After a swap", "After releasing memory"], rows)
        + f"\nfloat32 with an adapter on vLLM is {answer}.\n"
    )


def _gap(figures: dict[str, float] | None) -> str:
    return f"{figures['mean']:.1e} ({figures['stale_mean']:.1e})" if figures else "–"


def rounds(part: dict[str, Any]) -> str:
    """Return the table of rounds per hour."""
    sides = part.get("sides", {}).values()
    if not sides:
        return ""
    rows = [[side["label"], f"{side['rounds_per_hour']:,}", f"{side['first_seconds']:.0f} s"] for side in sides]
    text = f"### Rounds per hour\n\n{part['prompts']} prompts, {part['episodes']} responses of at most "
    text += f"{part['sampled_tokens']} tokens, one gradient step.\n\n"
    return text + table(["Side", "Rounds per hour", "First round done"], rows)


def exactness(part: dict[str, Any]) -> str:
    """Return the table of differences from float32."""
    rows = []
    for side, dtypes in part.get("sides", {}).items():
        for dtype, figures in dtypes.items():
            values = [f"{figures[key]:.1e}" for key in ("logprob_mean", "logprob_max", "gradient")]
            rows.append([NAMES[side], dtype, *values])
    if not rows:
        return ""
    head = ["Side", "Dtype", "Log-probability, mean (nats)", "Most", "Gradient, relative"]
    return f"### Differences from float32, workload ({part['workload']})\n\n" + table(head, rows)


def missing(parts: dict[str, Any]) -> str:
    """Return the list of what was not measured."""
    lines = [f"- `{name}`: {part['status']}" for name, part in parts.items() if part["status"] != "complete"]
    for name, part in parts.items():
        lines += [f"- `{name}`, {what}: {cause}" for what, cause in part["result"].get("skipped", {}).items()]
    return "### Not measured\n\n" + "\n".join(lines) + "\n" if lines else ""


def _median(side: dict[str, Any]) -> float:
    return side["seconds"]["median"]


def _short(results: dict[str, Any]) -> str:
    """Return the name of the GPU's model."""
    return results["gpu"]["name"].split()[1]


PAGE = Generated("results/gpu.md", "gpu", content)

if __name__ == "__main__":
    main(sys.argv[1:])
