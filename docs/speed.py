"""A gradient step's speed, in docs/architecture.md.

python tests/benchmarks/train_step.py --json --workload a | python -m docs.speed add     keep a workload's result
python -m docs.speed                                                                     write the table
"""

from __future__ import annotations

import sys
from typing import Any

from docs.recorded import Known, Recorded

WORKLOADS = {
    "a": "one turn: prompt 400, answers 100",
    "b": "agent: prompt 1,200, six turns, apart from the first answer on",
    "c": "nothing shared, lengths from 100 to 1,500",
    "d": "as b, the group splits in two at each turn",
}


def _rows(known: Known) -> list[list[str]]:
    return [_row(name, known[name]) for name in WORKLOADS if name in known]


def _row(name: str, one: dict[str, Any]) -> list[str]:
    seconds = [_seconds(one[f"{form}_seconds"]) for form in ("ours", "trl", "padded")]
    memory = "–"
    if "memory_ratio_vs_trl" in one:
        memory = f"{one['ours_peak_mb'] / 1e3:.1f} / {one['trl_peak_mb'] / 1e3:.1f} GB"
    ratios = [f"{one[key]:.2f}" for key in ("ratio_vs_trl", "ratio_vs_padded", "bound")]
    return [f"({name}) {WORKLOADS[name]}", f"{one['tokens']:,}, {one['distinct_tokens']:,}", *seconds, *ratios, memory]


def _seconds(found: dict[str, float]) -> str:
    return f"{found['median']:.1f} ({found['min']:.1f} to {found['max']:.1f})"


TABLE = Recorded(
    "architecture.md",
    "speed",
    "train_step.json",
    [
        "Groups of 8",
        "Tokens, distinct",
        "Seconds of a step, median (least to most): ours",
        "TRL",
        "padded",
        "TRL / ours",
        "padded / ours",
        "Operations",
        "Memory, ours / TRL",
    ],
    _rows,
)

if __name__ == "__main__":
    TABLE.main(sys.argv[1:])
