"""Failures of a stage's episodes and the limits that shaped them, for the console, the log and the report."""

from __future__ import annotations

from collections.abc import Iterator

from components.artifacts import Artifact
from components.trajectories.failures import FailureKind
from components.trajectories.truncation import MESSAGES, limit_texts
from flows.stages import STAGES

SHOWN_SHARE = 0.1
"""Share of answers that are cut off from which the console names it; the report always does."""


def failures_of(artifact: Artifact) -> list[FailureKind]:
    """Return the kinds of failures among the episodes of an artifact. Read the episodes only if one failed."""
    failed = (value for name, value in artifact.metrics.items() if name.rpartition("/")[2] == "failed")
    if not STAGES[artifact.stage].plays or not any(failed):
        return []
    from components.trajectories.failures import failure_kinds
    from components.trajectories.store import read_failures

    return failure_kinds(read_failures(artifact.path / "trajectories.parquet"))


def lines(label: str, artifact: Artifact) -> Iterator[str]:
    """Yield a line for each kind of failure, and for each limit that truncated episodes or at least a tenth of the
    answers."""
    for kind in failures_of(artifact):
        yield f"  {label} failed: {kind}"
    for limit, (share, text) in limits_of(artifact).items():
        if limit != MESSAGES or share >= SHOWN_SHARE:
            yield f"  {label} truncated: {text}"


def limits_of(artifact: Artifact) -> dict[str, tuple[float, str]]:
    """Return the limits that shaped the episodes of an artifact, as `limit_texts`."""
    return limit_texts(artifact.metrics) if STAGES[artifact.stage].plays else {}
