"""Writes the table of environments in docs/environments.md from recorded results.

    python tests/benchmarks/environments.py --json | python -m docs.played add     keep the results
    python -m docs.played                                                          write the table

docs/results/environments.json holds the last one of each environment option; one that is not measured this time stays.
`tests/docs` fails while the table is not what this writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "environments.md"
RECORD = Path(__file__).parent / "results" / "environments.json"
BEGIN, END = "<!-- played -->", "<!-- /played -->"
HEAD = "| `environment=` | Scenarios, train and held out | Solver succeeds | Chance succeeds | Steps per second |"


def main(arguments: list[str]) -> None:
    if arguments == ["add"]:
        known = recorded()
        for name, one in json.loads(sys.stdin.read().splitlines()[-1]).items():
            if "not_measured" not in one or "not_measured" in known.get(name, one):
                known[name] = one
        RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


def recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def page() -> str:
    """The page, its table made anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}"


def table() -> str:
    known = recorded()
    rows = [_row(name, one) for name, one in sorted(known.items()) if "not_measured" not in one]
    if not rows:
        return "No result is recorded yet.\n"
    missing = [f"`{name}` ({one['not_measured']})" for name, one in sorted(known.items()) if "not_measured" in one]
    rest = f"\nNot measured: {', '.join(missing)}.\n" if missing else ""
    return "\n".join([HEAD, "|---" * (HEAD.count("|") - 1) + "|", *rows]) + "\n" + rest


def _row(name: str, one: dict[str, Any]) -> str:
    cells = [f"`{name}`", f"{one['train']:,}, {one['heldout']:,}", _rate(one.get("solver")), _rate(one["chance"])]
    return f"| {' | '.join([*cells, _speed(one['steps_per_s'])])} |"


def _rate(found: dict[str, Any] | None) -> str:
    if not found or not found["tried"]:
        return "none"
    return f"{found['won']} of {found['tried']}"


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


if __name__ == "__main__":
    main(sys.argv[1:])
