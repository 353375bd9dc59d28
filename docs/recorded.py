"""A table on a page of docs, made from recorded results.

    python BENCHMARK --json | python -m docs.NAME add     keep the results
    python -m docs.NAME                                   write the table

A record below docs/results/ holds the last result of each name; one that is not measured this time stays. `tests/docs`
fails while a table is not what this writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
Known = dict[str, Any]
"""Results by name."""


def all_of(known: Known, found: Known) -> Known:
    """New results take the place of old ones."""
    return known | found


@dataclass(frozen=True)
class Recorded:
    """One table, and its record."""

    page: str
    """Below docs; the table stands there between `<!-- mark -->` and `<!-- /mark -->`."""
    mark: str
    record: str
    """Below docs/results."""
    columns: Sequence[str]
    rows: Callable[[Known], list[list[str]]]
    """The cells of each row."""
    rest: Callable[[Known], str] = lambda known: ""
    """What follows the table."""
    merged: Callable[[Known, Known], Known] = all_of
    """What is known with new results."""

    def main(self, arguments: Sequence[str]) -> None:
        """The command. Results to be kept are the last line of what is read."""
        if list(arguments) == ["add"]:
            known = self.merged(self.known(), json.loads(sys.stdin.read().splitlines()[-1]))
            self._record.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        (DOCS / self.page).write_text(self.made(), encoding="utf-8")

    def known(self) -> Known:
        """Return the recorded results."""
        return json.loads(self._record.read_text(encoding="utf-8")) if self._record.is_file() else {}

    def written(self) -> str:
        """Return the page as it is stored."""
        return (DOCS / self.page).read_text(encoding="utf-8")

    def made(self) -> str:
        """Return the page with its table recomputed."""
        begin, end = f"<!-- {self.mark} -->", f"<!-- /{self.mark} -->"
        before, _, rest = self.written().partition(begin)
        return f"{before}{begin}\n{self.table()}{end}{rest.partition(end)[2]}"

    def table(self) -> str:
        known = self.known()
        rows = self.rows(known)
        if not rows:
            return "No result is recorded yet.\n"
        lines = [_line(self.columns), "|---" * len(self.columns) + "|", *map(_line, rows)]
        return "\n".join(lines) + "\n" + self.rest(known)

    @property
    def _record(self) -> Path:
        return DOCS / "results" / self.record


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
