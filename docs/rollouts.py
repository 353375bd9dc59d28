"""Writes the table of what waiting episodes cost in docs/rollouts.md from a recorded result.

    python tests/benchmarks/rollouts.py --json --art PYTHON --verifiers PYTHON | python -m docs.rollouts add
    python -m docs.rollouts                                                          write the table

docs/results/rollouts.json holds the last result of each width. `tests/docs` fails while the table is not what this
writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "rollouts.md"
RECORD = Path(__file__).parent / "results" / "rollouts.json"
BEGIN, END = "<!-- rollouts -->", "<!-- /rollouts -->"
HEAD = (
    "| Episodes at once | Wall-clock time over ideal | CPU time of a request | openpipe-art's, times ours | "
    "verifiers', times ours | Memory of an episode |"
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
    rows = [_row(name, known[name]) for name in sorted(filter(str.isdecimal, known), key=int)]
    if not rows:
        return "No result is recorded yet.\n"
    return "\n".join([HEAD, "|---" * (HEAD.count("|") - 1) + "|", *rows]) + "\n"


def _row(name: str, one: dict[str, float]) -> str:
    ratios = [f"{one[key]:.1f}" if key in one else "–" for key in ("cpu_ratio_vs_art", "cpu_ratio_vs_verifiers")]
    cells = [
        f"{int(name):,}",
        f"{one['wall_over_ideal']:.2f}",
        f"{one['cpu_ms_per_call']:.2f} ms",
        *ratios,
        f"{one['kb_per_episode']:.0f} kB",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
