"""How a run is tracked."""

from __future__ import annotations

from pydantic import Field

from components.specs import Spec


class TrackingSpec(Spec):
    uri: str | None = None
    """MLflow tracking server or database. None means SQLite under the run root: `<root>/mlflow/mlflow.db`."""
    experiment: str | None = None
    """Name of the MLflow experiment; None takes the experiment's own name."""
    traces: int = Field(8, ge=0)
    """Episodes of each evaluation that are kept as MLflow traces; 0 keeps none."""
    patience: float = Field(300.0, ge=0)
    """Seconds that a run waits at its end for an MLflow server that is away. While it runs it does not wait: what could
    not be said is said later."""
