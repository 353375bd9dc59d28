"""Success of a served policy in production, by version: the scores that its users gave (`components.data.served`).

A conversation has the score that was given for it, else the mean of the scores of its answers. It is a success above
0.5. Conversations without a score are counted, and say nothing about success.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from components.data.served.log import read
from components.data.served.rows import standing
from components.evaluation.proportions import independent_difference, wilson
from components.evaluation.verdict import outcome


@dataclass
class ServedVersion:
    """Results of one version."""

    version: str
    conversations: int = 0
    scored: int = 0
    successes: int = 0
    success: float | None = None
    """Share of successes among scored conversations; None without any."""
    interval: tuple[float, float] | None = None
    """95 % interval of `success` (Wilson)."""
    median_seconds: float = 0.0
    """Median latency of an answer."""
    against_first: dict[str, Any] | None = None
    """Difference in success to the first version, 95 % interval (Newcombe) and verdict; None if one has no scores."""


def served_versions(folder: Path) -> list[ServedVersion]:
    """Return the results of the versions in a folder of recorded conversations, in the order of their first answers."""
    version_of: dict[str, str] = {}
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for line in read(folder):
        if "id" in line:
            version_of[line["conversation"]] = line["version"]
            seconds[line["version"]].append(line["seconds"])
    scores: defaultdict[str, dict[str | None, float]] = defaultdict(dict)
    for line in standing(read(folder)):
        if "score" in line:
            scores[line["conversation"]][line["answer"]] = line["score"]
    results = {version: ServedVersion(version, median_seconds=median(times)) for version, times in seconds.items()}
    for conversation, version in version_of.items():
        results[version].conversations += 1
        if feedback := scores.get(conversation):
            results[version].scored += 1
            results[version].successes += (feedback[None] if None in feedback else fmean(feedback.values())) > 0.5
    versions = list(results.values())
    for result in versions:
        if result.scored:
            result.success = result.successes / result.scored
            result.interval = wilson(result.successes, result.scored)
    for result in versions[1:]:
        if result.success is not None and versions[0].success is not None:
            counts = [(side.successes, side.scored) for side in (result, versions[0])]
            low, high = independent_difference(*counts)
            difference = result.success - versions[0].success
            result.against_first = {"difference": difference, "low": low, "high": high, "verdict": outcome(low, high)}
    return versions


def to_text(versions: list[ServedVersion]) -> str:
    """Return the results as text: a table, and the verdict on each version against the first."""
    rows = [("version", "conversations", "scored", "success [95 %]", "median latency")]
    for result in versions:
        success = "–"
        if result.interval is not None:
            success = f"{result.success:.3f} [{result.interval[0]:.3f}, {result.interval[1]:.3f}]"
        counts = str(result.conversations), str(result.scored)
        rows.append((result.version, *counts, success, f"{result.median_seconds:.2f} s"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for result in versions[1:]:
        pair, change = f"{result.version} against {versions[0].version}", result.against_first
        if change is None:
            lines.append(f"verdict: {pair}: undecided, because one of them has no scores")
        else:
            numbers = f"{change['difference']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"
            lines.append(
                f"verdict: {pair}: {change['verdict']}, success {numbers} (independent samples, Newcombe 1998)"
            )
    return "\n".join(lines)


def to_json(versions: list[ServedVersion]) -> dict[str, Any]:
    """Return the results as JSON data."""
    return {"versions": [asdict(version) for version in versions]}
