"""Failures of a stage's episodes, for the console, the log and the report."""

from __future__ import annotations

from collections.abc import Iterator

from components.artifacts import Artifact
from components.trajectories.failures import FailureKind
from flows.stages import STAGES


def failures_of(artifact: Artifact) -> list[FailureKind]:
    """Return the kinds of failures among the episodes of an artifact. Read the episodes only if one failed."""
    failed = (value for name, value in artifact.metrics.items() if name.rpartition("/")[2] == "failed")
    if not STAGES[artifact.stage].plays or not any(failed):
        return []
    from components.trajectories.failures import failure_kinds
    from components.trajectories.store import read_failures

    return failure_kinds(read_failures(artifact.path / "trajectories.parquet"))


def lines(label: str, artifact: Artifact) -> Iterator[str]:
    """Yield a line for each kind of failure."""
    for kind in failures_of(artifact):
        yield f"  {label} failed: {kind}"
