"""Mirror of the tags and notes of a run in MLflow."""

from __future__ import annotations

from pathlib import Path

from components.errors import EspalierError
from components.specs import validate
from components.tracking.spec import TrackingSpec
from flows.history.labels import RunLabels
from flows.history.records import RunRecord


def mirror(root: Path, run: RunRecord, labels: RunLabels) -> str:
    """Write the labels to MLflow. Return the reason if that is not possible, else an empty text."""
    from components.tracking.labels import mirror_labels

    try:
        spec = validate(TrackingSpec, run.spec.get("tracking") or {}, path="tracking")
        mirror_labels(root, spec, run.id, labels.tags, labels.notes)
    except EspalierError as error:
        return str(error)
    return ""


def result(run: RunRecord, labels: RunLabels, problem: str) -> dict[str, object]:
    """Return the labels of a run as JSON data."""
    return {"run": run.id, "tags": labels.tags, "notes": labels.notes, "mlflow": problem or "updated"}
