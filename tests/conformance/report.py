"""Results of conformance suites in one form, for each runner of this folder and for `python -m tests.conformance`.

A runner executes a suite that other people wrote against this project and returns a `Report`. A case is `passed` or
`failed` as the suite decides; `refused` if the project declines by design what the case requires, with the reason;
`skipped` if the case could not be executed here, with the reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Outcome = Literal["passed", "failed", "refused", "skipped"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
SHOWN = 110
"""Maximum number of characters of a reason in a table; JSON has all of it."""


class Unavailable(Exception):
    """A suite cannot run here; the message says why."""


@dataclass(frozen=True)
class Case:
    """One case of a suite. reason: why it failed, was refused or skipped."""

    name: str
    outcome: Outcome
    reason: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome = {self.outcome!r}: expected one of {', '.join(OUTCOMES)}")
        if self.outcome != "passed" and not self.reason:
            raise ValueError(f"{self.name}: the outcome {self.outcome} requires a reason")


@dataclass(frozen=True)
class Report:
    """The result of one suite. reason: why the suite was skipped as a whole; then there are no cases."""

    suite: str
    version: str
    command: str
    cases: list[Case] = field(default_factory=list)
    reason: str = ""

    def count(self, outcome: Outcome) -> int:
        return Counter(case.outcome for case in self.cases)[outcome]

    @property
    def exit_code(self) -> int:
        """0 if no case failed, 1 otherwise."""
        return 1 if self.count("failed") else 0

    def json(self) -> dict[str, Any]:
        return asdict(self) | {outcome: self.count(outcome) for outcome in OUTCOMES}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Report:
        """Return the report that `json` wrote."""
        cases = [Case(case["name"], case["outcome"], case["reason"]) for case in value["cases"]]
        return cls(value["suite"], value["version"], value["command"], cases, value["reason"])


def show(report: Report, as_json: bool) -> int:
    """Print a report, as one JSON object or as a table of its cases; return the exit code."""
    print(json.dumps(report.json()) if as_json else cases_text(report))
    return report.exit_code


def cases_text(report: Report) -> str:
    """Return the cases of a report as text, with a line of counts at the end."""
    title = f"{report.suite} {report.version}".strip()
    if report.reason:
        return f"{title}: skipped: {report.reason}"
    rows = [(case.name, case.outcome, shortened(case.reason)) for case in report.cases]
    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in OUTCOMES)
    return f"{table(('case', 'outcome', 'reason'), rows)}\n\n{title}: {len(rows)} cases: {counts}"


def suites_text(reports: Sequence[Report]) -> str:
    """Return one line for each suite, then its cases that did not pass, grouped by the reason."""
    header = ("suite", "version", "cases", "passed", "failed", "refused", "skipped", "command")
    rows = [
        (
            report.suite,
            report.version,
            str(len(report.cases)),
            *(str(report.count(o)) for o in OUTCOMES),
            report.command,
        )
        for report in reports
    ]
    lines = [table(header, rows)]
    for report in reports:
        grouped: dict[tuple[str, str], list[str]] = {}
        for case in report.cases:
            if case.outcome != "passed":
                grouped.setdefault((case.outcome, case.reason), []).append(case.name)
        notes = [f"  {outcome} {', '.join(names)}: {reason}" for (outcome, reason), names in grouped.items()]
        if report.reason:
            notes = [f"  skipped: {report.reason}"]
        lines += ["", report.suite, *notes] if notes else []
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table of text."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )


def shortened(text: str) -> str:
    """Return the first line of a text, at most SHOWN characters."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
