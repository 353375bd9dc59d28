"""Table of kills in docs/concepts/reliability.md from a recorded result.

    python -m tests.faults.kill --json | python -m docs.faults add     keep the result
    python -m docs.faults                                              write the table

docs/results/kills.json holds the last one. `tests/docs` fails while the table is not what this writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "concepts" / "reliability.md"
RECORD = Path(__file__).parent / "results" / "kills.json"
BEGIN, END = "<!-- kills -->", "<!-- /kills -->"
FOUND = {
    "stages_that_differ": "stages with other bytes than in the undisturbed run, although no kill hit their episodes or "
    "those of their inputs",
    "runs_that_differ": "runs that differ after a kill during episodes",
    "episodes_not_as_declared": "runs with another number of episodes than declared",
    "stages_made_twice": "stages that ran twice",
    "processes_left": "processes that were alive ten seconds after a kill",
    "episodes_again": "finished episodes that were repeated",
}


def main(arguments: list[str]) -> None:
    if arguments == ["add"]:
        result = json.loads(sys.stdin.read().splitlines()[-1])
        RECORD.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page with its table recomputed."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}"


def table() -> str:
    if not RECORD.is_file():
        return "No result is recorded yet.\n"
    one: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    where = ", ".join(f"{count} in `{label}`" for label, count in one["kills_by_stage"].items())
    how = ", ".join(f"{count} of the {what}" for what, count in sorted(one["kills_of"].items()))
    rows = [f"| {title} | {one[name]} |" for name, title in FOUND.items()]
    runs = "1 run" if one["runs"] == 1 else f"{one['runs']} runs"
    head = f"{one['kills']} kills ({how}) in {runs} with {one['episodes']} episodes: {where}."
    return "\n".join([head, "", "| Of these | |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
