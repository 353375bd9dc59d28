"""Writes the table of a gradient step's speed in docs/architecture.md from recorded results.

    python tests/benchmarks/train_step.py --json --workload a | python -m docs.speed add     keep a workload's result
    python -m docs.speed                                                                     write the table

docs/results/train_step.json holds the last one of each workload. `tests/docs` fails while the table is not what this
writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "architecture.md"
RECORD = Path(__file__).parent / "results" / "train_step.json"
BEGIN, END = "<!-- speed -->", "<!-- /speed -->"
WORKLOADS = {
    "a": "one turn: prompt 400, answers 100",
    "b": "agent: prompt 1,200, six turns, apart from the first answer on",
    "c": "nothing shared, lengths from 100 to 1,500",
    "d": "as b, the group splits in two at each turn",
}
HEAD = (
    "| Groups of 8 | Tokens, distinct | Seconds of a step, median (least to most): ours | TRL | padded | TRL / ours | "
    "padded / ours | Operations | Memory, ours / TRL |"
)


def main(arguments: list[str]) -> None:
    if arguments == ["add"]:
        known = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
        known |= json.loads(sys.stdin.read().splitlines()[-1])
        RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page, its table made anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}"


def table() -> str:
    known: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    rows = [_row(name, known[name]) for name in WORKLOADS if name in known]
    if not rows:
        return "No result is recorded yet.\n"
    return "\n".join([HEAD, "|---" * HEAD.count(" |") + "|", *rows]) + "\n"


def _row(name: str, one: dict[str, Any]) -> str:
    seconds = [_seconds(one[f"{form}_seconds"]) for form in ("ours", "trl", "padded")]
    memory = "–"
    if "memory_ratio_vs_trl" in one:
        memory = f"{one['ours_peak_mb'] / 1e3:.1f} / {one['trl_peak_mb'] / 1e3:.1f} GB"
    ratios = [f"{one[key]:.2f}" for key in ("ratio_vs_trl", "ratio_vs_padded", "bound")]
    cells = [f"({name}) {WORKLOADS[name]}", f"{one['tokens']:,}, {one['distinct_tokens']:,}", *seconds, *ratios, memory]
    return f"| {' | '.join(cells)} |"


def _seconds(found: dict[str, float]) -> str:
    return f"{found['median']:.1f} ({found['min']:.1f} to {found['max']:.1f})"


if __name__ == "__main__":
    main(sys.argv[1:])
