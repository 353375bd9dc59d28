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
SIDES = {
    "ours_flex": "Espalier, FlexAttention",
    "ours_sdpa": "Espalier, dense mask",
    "padded": "padded rows",
    "trl": "TRL `GRPOTrainer`",
    "trl_tree": "TRL `AsyncGRPOTrainer`",
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
        steps(parts),
        exactness(parts.get("exact", {})),
        generation(parts.get("generate", {})),
        overlapped(parts.get("overlap", {})),
        missing(results["parts"]),
    ]
    return "\n".join(section for section in sections if section)


def summary(results: dict[str, Any]) -> str:
    """Return the sentence of the README: median steps of workload (b) against TRL's synchronous trainer."""
    sides = results["parts"]["train_b"]["result"]["sides"]
    trl = sides["trl"]
    (flex, flex_memory), (dense, memory) = (
        (sides[side]["seconds"]["median"] / trl["seconds"]["median"], sides[side]["peak_mb"] / trl["peak_mb"])
        for side in ("ours_flex", "ours_sdpa")
    )
    return (
        f"On an H100, a GRPO step on episodes of six turns takes {flex:.2f} of the time and {flex_memory:.2f} of the "
        "memory of TRL's `GRPOTrainer` with FlexAttention, compilation included, and "
        f"{dense:.2f} and {memory:.2f} with a dense mask ([measurements](docs/results/gpu.md))."
    )


def machine(results: dict[str, Any]) -> str:
    """Return a sentence on the machine and the versions."""
    gpu, versions = results["gpu"], ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    clocks = results["parts"].get("train_b", {}).get("result", {}).get("clocks") or results.get("clocks_idle") or {}
    clock = f", SM clock {clocks['sm_clock_mhz']} of {clocks['sm_clock_max_mhz']} MHz" if clocks else ""
    served = f"; server {results['vllm']}" if results.get("vllm") else ""
    return (
        f"{gpu['name']} ({gpu['memory_gb']} GB, driver {gpu['driver']}, CUDA {gpu['cuda']}{clock}); {results['cpu']}; "
        f"{versions}{served}. Commit {results['commit']}, {results['date'][:10]}, {results['seconds'] / 60:.1f} "
        "minutes.\n"
    )


def steps(parts: dict[str, Any]) -> str:
    """Return the table of gradient steps."""
    rows = []
    for name in "abcd":
        part = parts.get(f"train_{name}", {})
        for side, label in SIDES.items():
            if side in part.get("sides", {}):
                figures = part["sides"][side]
                seconds = figures["seconds"]
                spread = f"{seconds['median']:.3f} ({seconds['min']:.3f} to {seconds['max']:.3f})"
                kernel = f", {part['trl_tree_kernel']}" if side == "trl_tree" else ""
                memory = f"{figures['peak_mb'] / 1e3:.2f} GB"
                rows.append([f"({name})", label + kernel, spread, f"{figures['tokens_per_s']:,}", memory])
    if not rows:
        return ""
    head = ["Workload", "Side", "Seconds of a step, median (least to most)", "Tokens/s", "Memory of the step"]
    return "### Gradient steps\n\n" + table(head, rows)


def exactness(part: dict[str, Any]) -> str:
    """Return the table of differences from float32."""
    rows = []
    for name, sides in part.get("workloads", {}).items():
        for side, figures in sides.items():
            label, _, dtype = side.rpartition("_")
            values = [f"{figures[key]:.1e}" for key in ("logprob_mean", "logprob_max", "gradient")]
            rows.append([f"({name})", SIDES.get(label, label), dtype, *values])
    if not rows:
        return ""
    head = ["Workload", "Side", "Dtype", "Log-probability, mean (nats)", "Most", "Gradient, relative"]
    return "### Differences from float32\n\n" + table(head, rows)


def generation(part: dict[str, Any]) -> str:
    """Return the table of engines."""
    labels = {"embedded": "embedded engine", "transformers": "transformers, one batch", "vllm": "vLLM"}
    rows = [
        [
            label,
            f"{figures['tokens_per_s']:,}",
            f"{figures['swap_seconds']:.2f} s" if "swap_seconds" in figures else "–",
            f"{figures['swap_and_answer_seconds']:.2f} s" if "swap_and_answer_seconds" in figures else "–",
            f"{figures['start_seconds']:.0f} s",
        ]
        for name, label in labels.items()
        if "tokens_per_s" in (figures := part.get("sides", {}).get(name, {}))
    ]
    if not rows:
        return ""
    text = f"### Generation\n\n{part['requests']} requests at once, {part['sampled_tokens']} sampled tokens each.\n\n"
    text += table(["Engine", "Sampled tokens/s", "Adapter swap", "Swap and first token", "Start"], rows)
    if difference := part.get("logprob_difference"):
        text += (
            f"\nLog-probabilities of vLLM's tokens differ from the embedded engine's by {difference['mean']:.1e} nats "
            f"on average, {difference['max']:.1e} at most ({difference['tokens']} tokens).\n"
        )
    return text


def overlapped(part: dict[str, Any]) -> str:
    """Return a sentence on the overlapped run."""
    if not part.get("stage_seconds"):
        return ""
    beside = ", ".join(f"`{name}` {seconds:.1f} s" for name, seconds in part["overlapped_seconds"].items())
    trainings = ", ".join(
        f"{seconds:.1f} s" for name, seconds in part["stage_seconds"].items() if name.startswith("train[")
    )
    return f"### Overlapped rounds\n\nTrainings: {trainings}. Beside a training: {beside or 'nothing'}.\n"


def missing(parts: dict[str, Any]) -> str:
    """Return the list of what was not measured."""
    lines = [f"- `{name}`: {part['status']}" for name, part in parts.items() if part["status"] != "complete"]
    for name, part in parts.items():
        lines += [f"- `{name}`, {side}: {cause}" for side, cause in part["result"].get("skipped_sides", {}).items()]
    return "### Not measured\n\n" + "\n".join(lines) + "\n" if lines else ""


PAGE = Generated("results/gpu.md", "gpu", content)

if __name__ == "__main__":
    main(sys.argv[1:])
