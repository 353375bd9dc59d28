"""Quickstart's table in README.md and docs/results/index.md, from the recorded results of its runs.

    python -m flows.run +experiment=quickstart seed=0 | python -m docs.results add     keep the result of a run
    python -m docs.results                                                             write the tables

A run's result is the JSON object that it prints as its last line; docs/results/quickstart.jsonl holds one for each
seed, without paths, with the commit and the processor that it ran on. Runs that the table shows together are of one
commit, in which no file differs from it. `tests/docs` fails while the table is not what this writes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "results" / "index.md")
RECORD = Path(__file__).parent / "results" / "quickstart.jsonl"
BEGIN, END = "<!-- quickstart-table -->", "<!-- /quickstart-table -->"
LEFT_OUT = ("run_id", "stages", "export", "report")


def main(arguments: list[str]) -> None:
    if arguments == ["add"]:
        add(json.loads(sys.stdin.read().splitlines()[-1]))
    for page in PAGES:
        page.write_text(with_table(page), encoding="utf-8")


def add(result: dict[str, Any]) -> None:
    """Record a result in place of an earlier one of the same seed, and of all that another commit gave."""
    new = {name: value for name, value in result.items() if name not in LEFT_OUT}
    new |= {"commit": commit(), "processor": processor()}
    results = {one["seed"]: one for one in recorded() if one.get("commit") == new["commit"]} | {new["seed"]: new}
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text("".join(json.dumps(results[seed]) + "\n" for seed in sorted(results)), encoding="utf-8")


def commit() -> str:
    """Return the commit of the code. Exits where a file of the code differs from it: a result would have no commit."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "components", "conf", "flows", "requirements")
    if changed:
        sys.exit(f"results belong to a commit, and these files differ from it; commit them first:\n{changed}")
    return _git("rev-parse", "--short=10", "HEAD")


def processor() -> str:
    """Return the name of the processor, and how many cores this process may use."""
    names = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", names.read_text(encoding="utf-8")) if names.is_file() else None
    return f"{len(os.sched_getaffinity(0))} × {name[1] if name else platform.processor() or platform.machine()}"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.is_file() else []


def with_table(page: Path) -> str:
    """Return a page with the table of the recorded results."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
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
    return "\n".join(rows) + f"\n\nHeld-out success, with 95 % intervals. {_origin()}\n"


def _origin() -> str:
    """Return where the results come from."""
    commits, processors = (sorted({one[name] for one in recorded()}) for name in ("commit", "processor"))
    return f"Commit {', '.join(commits)}; {', '.join(processors)}."


def _interval(one: dict[str, Any], name: str) -> str:
    low, high = one[f"{name}_interval"]
    return f"{one[name]:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main(sys.argv[1:])
