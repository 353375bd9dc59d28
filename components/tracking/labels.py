"""Tags and notes of a finished or running run in MLflow: the tag `tag.NAME` for each tag, and the run's description."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from components.errors import ResourceError
from components.redaction import mask_text
from components.tracking import store
from components.tracking.spec import TrackingSpec

PREFIX = "tag."
_NOTE = "mlflow.note.content"
_MAX_NOTE = 8000
"""Maximum length of a description in characters (a limit of MLflow)."""


def mirror_labels(root: Path, spec: TrackingSpec, run_id: str, tags: Sequence[str], notes: Sequence[str]) -> None:
    """Make the tags and the description of a run in MLflow equal to these. Raises ResourceError if MLflow is
    unreachable or does not have the run."""
    uri = spec.resolved_uri() or store.local_uri(root)
    if spec.uri is None and not (root / "mlflow" / "mlflow.db").exists():
        raise ResourceError(f"there is no MLflow store below {root}")
    client = store.connect(uri, root / "mlflow" / "artifacts")
    from mlflow.exceptions import MlflowException

    try:
        present = {key for key in client.get_run(run_id).data.tags if key.startswith((PREFIX, _NOTE))}
        wanted = {f"{PREFIX}{tag}": "true" for tag in tags}
        if notes:
            wanted[_NOTE] = "\n\n".join(notes)[:_MAX_NOTE]
        for key in present - wanted.keys():
            client.delete_tag(run_id, key)
        for key, value in wanted.items():
            client.set_tag(run_id, key, value)
    except MlflowException as error:
        raise ResourceError(
            mask_text(f"MLflow at {uri} does not take the labels of run {run_id[:8]}: {error}")
        ) from None
