"""Artifacts in MLflow: datasets as inputs of the run, checkpoints as its output models, and an export as a version in
the model registry. All of them are references: no weights are copied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.redaction import mask_text
from components.tracking.params import clean_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from components.artifacts import Artifact

INSERT_ATTEMPTS = 10
"""Attempts to insert a dataset, which fail if another process inserts one at the same moment."""
_MAX_DIGEST = 36
"""Maximum length of a dataset's digest in MLflow."""
_SIZE_LIMIT = 1 << 20
"""Size in bytes from which files are logged by reference only."""


def files(folder: Path) -> list[tuple[Path, int]]:
    """Return all files below a folder with their sizes in bytes, sorted by path."""
    return sorted((path, path.stat().st_size) for path in folder.rglob("*") if path.is_file())


def describe(artifact: Artifact, label: str, status: str, seconds: float) -> tuple[dict[str, Any], list[Path]]:
    """Return the reference to an artifact (JSON data: location, key and digest, each file with its size), and those of
    its files that are small enough to be logged in full."""
    listed = files(artifact.path)
    small = [path for path, size in listed if size < _SIZE_LIMIT]
    reference = {
        "label": label,
        "stage": artifact.stage,
        "status": status,
        "seconds": round(seconds, 3),
        "seconds_when_made": round(artifact.seconds, 3),
        "kind": artifact.kind,
        "schema_version": artifact.schema_version,
        "key": artifact.key,
        "digest": artifact.digest,
        "uri": artifact.path.absolute().as_uri(),
        "bytes": sum(size for _, size in listed),
        "inputs": dict(artifact.inputs),
        "metrics": dict(artifact.metrics),
        "files": [
            {"path": path.relative_to(artifact.path).as_posix(), "bytes": size, "copied": size < _SIZE_LIMIT}
            for path, size in listed
        ],
    }
    return reference, small


def log_dataset(client: MlflowClient, run_id: str, artifact: Artifact, label: str, context: str) -> None:
    """Add an artifact to the run's input datasets, in a context such as `train`. Retried if another run adds the same
    one concurrently: MLflow looks a dataset up and then inserts it, and rejects the second of two inserts."""
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.exceptions import MlflowException

    dataset = Dataset(
        name=label,
        digest=artifact.digest[:_MAX_DIGEST],
        source_type="local",
        source=json.dumps({"uri": artifact.path.absolute().as_uri(), "digest": artifact.digest, "key": artifact.key}),
        profile=json.dumps(artifact.metrics),
    )
    tag = InputTag(key="mlflow.data.context", value=context)
    for retries_left in reversed(range(INSERT_ATTEMPTS)):
        try:
            return client.log_inputs(run_id, datasets=[DatasetInput(dataset, [tag])])
        except MlflowException as error:
            if not retries_left or "IntegrityError" not in str(error):
                raise


def log_checkpoint(
    client: MlflowClient,
    experiment_id: str,
    run_id: str,
    artifact: Artifact,
    label: str,
    step: int,
    origin: Mapping[str, str] | None = None,
) -> str:
    """Log a checkpoint as an output model of this run at `step`; return the model's id. The items of `origin` describe
    its source and become tags of the model."""
    from mlflow.entities import LoggedModelOutput

    model = client.create_logged_model(
        experiment_id,
        name=clean_name(label).replace("/", "-").replace(":", "-").replace(".", "-"),
        source_run_id=run_id,
        tags={
            "uri": artifact.path.absolute().as_uri(),
            "stage_key": artifact.key,
            "digest": artifact.digest,
            **{f"input.{name}": key for name, key in artifact.inputs.items()},
            **{clean_name(name): mask_text(value) for name, value in (origin or {}).items()},
        },
        params={name: f"{value:.6g}" for name, value in artifact.metrics.items()},
        model_type="checkpoint",
    )
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
    return model.model_id


def register(
    client: MlflowClient, name: str, source: str, *, run_id: str, stage_key: str, tags: dict[str, str], description: str
) -> str:
    """Register a model version with this source; return its number. Idempotent: an existing version of the name with
    the same stage key and tag `uri` is returned, so a run that takes its export from the store adds none."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"name='{name}' and tags.stage_key='{stage_key}'", max_results=1)
    if versions and versions[0].tags.get("uri") == tags["uri"]:
        return str(versions[0].version)
    version = client.create_model_version(
        name, source, run_id=run_id, tags={**tags, "stage_key": stage_key}, description=description
    )
    return str(version.version)
