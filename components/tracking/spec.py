"""Spec of experiment tracking in MLflow."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.redaction import dereference
from components.specs import Spec
from components.specs.marks import SERVER


class TrackingSpec(Spec):
    uri: Annotated[str | None, SERVER] = None
    """MLflow tracking server or database. None uses SQLite under the run root: `<root>/mlflow/mlflow.db`. Give an
    address with a password as `env:NAME`, the environment variable from which it is read at the moment of use."""
    experiment: str | None = None
    """Name of the MLflow experiment; None uses the experiment's own name."""
    traces: int = Field(8, ge=0)
    """Number of episodes per evaluation that are stored as MLflow traces; 0 stores none."""
    patience: float = Field(300.0, ge=0)
    """Seconds that a run waits at its end for an unreachable MLflow server. During the run it does not wait: failed
    writes are queued and sent later."""

    def resolved_uri(self) -> str | None:
        """Return the address. Raise ResourceError if the environment variable that holds it is not set."""
        uri: str | None = dereference(self.uri, "tracking.uri")
        return uri
