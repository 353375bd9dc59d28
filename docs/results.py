"""Writes the quickstart's table in README.md from the recorded results of its runs.

    python -m flows.run +experiment=quickstart seed=0 | python -m docs.results add     keep the result of a run
    python -m docs.results                                                             write the table

A run's result is the JSON object that it prints as its last line; docs/results/quickstart.jsonl holds one for each
seed, without what names a place. `tests/docs` fails while the table is not what this writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
RECORD = Path(__file__).parent / "results" / "quickstart.jsonl"
BEGIN, END = "<!-- quickstart-table -->", "<!-- /quickstart-table -->"
LEFT_OUT = ("run_id", "stages", "export", "report")


def main(arguments: list[str]) -> None:
    if arguments == ["add"]:
        add(json.loads(sys.stdin.read().splitlines()[-1]))
    README.write_text(page(), encoding="utf-8")


def add(result: dict[str, Any]) -> None:
    """Records a result in place of an earlier one of the same seed."""
    kept = {name: value for name, value in result.items() if name not in LEFT_OUT}
    found = {one["seed"]: one for one in recorded()} | {kept["seed"]: kept}
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text("".join(json.dumps(found[seed]) + "\n" for seed in sorted(found)), encoding="utf-8")


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.is_file() else []


def page() -> str:
    """The README, its table made anew."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}"


def table() -> str:
    if not recorded():
        return "No run of this version is recorded yet; the run itself prints the table.\n"
    rows = [
        "| Seed | Start | After SFT | After GRPO | GRPO against SFT | Minutes | Memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in recorded():
        shown = [_interval(one, name) for name in ("success_start", "success_sft", "success", "gain")]
        minutes, memory = f"{one['seconds'] / 60:.1f}", f"{one['peak_memory_gb']:.1f} GB"
        rows.append("| " + " | ".join([str(one["seed"]), *shown, minutes, memory]) + " |")
    return "\n".join(rows) + "\n\nHeld-out success, with 95 % intervals.\n"


def _interval(one: dict[str, Any], name: str) -> str:
    low, high = one[f"{name}_interval"]
    return f"{one[name]:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main(sys.argv[1:])
