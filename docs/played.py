"""What was played for real in each environment, in docs/reference/environments.md.

python -m tests.benchmarks.environments --json | python -m docs.played add     keep the results
python -m docs.played                                                          write the table
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from docs.recorded import Known, Recorded


def _merged(known: Known, found: Known) -> Known:
    """One that could not be measured this time does not take the place of one that was."""
    taken = ("not_measured" not in one or "not_measured" in known.get(name, one) for name, one in found.items())
    return known | dict(itertools.compress(found.items(), taken))


def _rows(known: Known) -> list[list[str]]:
    return [_row(name, one) for name, one in sorted(known.items()) if "not_measured" not in one]


def _row(name: str, one: dict[str, Any]) -> list[str]:
    counts = f"{one['train']:,}, {one['heldout']:,}"
    return [
        f"`{name}`",
        one.get("plays", "Espalier"),
        counts,
        _rate(one.get("solver")),
        _rate(one["chance"]),
        _speed(one["steps_per_s"]),
    ]


def _rate(found: dict[str, Any] | None) -> str:
    if not found or not found["tried"]:
        return "none"
    return f"{found['won']} of {found['tried']}"


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _missing(known: Known) -> str:
    names = [f"`{name}` ({one['not_measured']})" for name, one in sorted(known.items()) if "not_measured" in one]
    return f"\nNot measured: {', '.join(names)}.\n" if names else ""


TABLE = Recorded(
    "reference/environments.md",
    "played",
    "environments.json",
    [
        "`environment=`",
        "Played by",
        "Scenarios, train and held out",
        "Solver succeeds",
        "Chance succeeds",
        "Steps per second",
    ],
    _rows,
    _missing,
    _merged,
)

if __name__ == "__main__":
    TABLE.main(sys.argv[1:])
