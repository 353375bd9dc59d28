"""Report of an import: counts of rows, and the rows that fail each check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from components.data.diversity import Diversity
from components.data.rows import BrokenRow, DataRow

CHECKS = {
    "malformed": "cannot be read, or lack a part of the form",
    "empty": "have an empty prompt, message or answer",
    "no_learnable_token": "have no assistant message to train on",
    "unknown_tool": "call a tool that is not among their tools",
    "tokenizer": "have text that the tokenizer or the chat template of the model cannot express",
    "too_long": "are longer than model.max_length",
    "leaked": "have the prompt of a held-out row",
    "duplicate": "repeat an earlier row",
    "near_duplicate": "almost repeat an earlier row",
}
"""Checks in their order, with what the rows that fail them have in common."""
EXAMPLES = 5
"""Number of rows that a report lists for each check."""


@dataclass
class CheckResult:
    """Rows that fail one check."""

    count: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    """First rows: source, number and reason."""

    def add(self, row: DataRow | BrokenRow, reason: str) -> None:
        """Count a row."""
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append({"source": row.source, "number": row.number, "reason": reason})


COUNTS = ("rows", "examples", "heldout", "episodes", "rejected", "comparable")
"""Fields of a report that are counts."""


@dataclass
class ImportReport:
    """Counts of an import."""

    form: str
    rows: int = 0
    """Rows read, training and held-out, broken ones included."""
    examples: int = 0
    """Rows that are trained on."""
    heldout: int = 0
    """Rows that are held out."""
    episodes: int = 0
    """Trajectories that are trained on; a preference pair has two."""
    rejected: int = 0
    """Trajectories of these with a reward of at most 0.5, such as the rejected answer of a pair."""
    comparable: int = 0
    """Prompts that are trained on with answers of different rewards: pairs, ranked answers, and conversations with a
    common id and prompt."""
    similar: CheckResult = field(default_factory=CheckResult)
    """Rows that almost repeat an earlier row and are used."""
    unused: dict[str, int] = field(default_factory=dict)
    """Rows with a value by column, of the columns that the form does not read."""
    missing: dict[str, CheckResult] = field(default_factory=dict)
    """Conversations of a log that are used, by what the log lacks for them: `token_ids`, `errors`."""
    diversity: Diversity = field(default_factory=Diversity)
    """Environments, types and lengths of the trajectories that are trained on."""
    checks: dict[str, CheckResult] = field(default_factory=lambda: {name: CheckResult() for name in CHECKS})

    def dropped(self) -> int:
        """Return the number of rows that were left out."""
        return self.rows - self.examples - self.heldout

    def unusable(self) -> int:
        """Return the number of rows that were left out for another reason than a repetition, which loses nothing."""
        return self.dropped() - sum(self.checks[name].count for name in ("duplicate", "near_duplicate"))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        checks = {name: asdict(result) for name, result in self.checks.items()}
        counts = {name: getattr(self, name) for name in COUNTS}
        missing = {name: asdict(result) for name, result in self.missing.items()}
        notes = {"similar": asdict(self.similar), "unused": self.unused} | ({"missing": missing} if missing else {})
        notes |= self.diversity.to_json()
        return {"form": self.form, **counts, "dropped": self.dropped(), "checks": checks, **notes}

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics."""
        counts = {f"dropped/{name}": float(result.count) for name, result in self.checks.items() if result.count}
        own = {name: float(getattr(self, name)) for name in COUNTS}
        own |= {"dropped": float(self.dropped()), "similar": float(self.similar.count)}
        return {**own, **counts, f"form/{self.form}": float(self.examples)}

    def first_dropped(self) -> str:
        """Return the first row that was dropped, with its place and the reason; empty if none was."""
        failed = [(name, result.examples[0]) for name, result in self.checks.items() if result.count]
        places = [(row["source"], row["number"], f"{_place(row)}: {row['reason']} ({name})") for name, row in failed]
        return min(places)[2] if places else ""


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['source']}:{row['number']}"


def check_message(name: str, result: CheckResult, *, strict: bool) -> str:
    """Return a check's count and examples as a message."""
    rows_shown = "; ".join(f"{_place(row)} ({row['reason']})" for row in result.examples)
    more = f"; and {result.count - len(result.examples)} more" if result.count > len(result.examples) else ""
    advice = ". Correct them, or leave them out with data.on_problem=drop" if strict else ""
    return f"{name}: {result.count} rows {CHECKS[name]}: {rows_shown}{more}{advice}"
