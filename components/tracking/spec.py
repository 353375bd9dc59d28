"""How a run is tracked."""

from __future__ import annotations

from pydantic import Field

from components.redaction import dereference
from components.specs import Spec


class TrackingSpec(Spec):
    uri: str | None = None
    """MLflow tracking server or database. None means SQLite under the run root: `<root>/mlflow/mlflow.db`. An address
    with a password is given as `env:NAME`, and read from that environment variable at the moment of use."""
    experiment: str | None = None
    """Name of the MLflow experiment; None takes the experiment's own name."""
    traces: int = Field(8, ge=0)
    """Episodes of each evaluation that are kept as MLflow traces; 0 keeps none."""
    patience: float = Field(300.0, ge=0)
    """Seconds that a run waits at its end for an MLflow server that is away. While it runs it does not wait: what could
    not be said is said later."""

    def resolved_uri(self) -> str | None:
        """Return the address itself. Raises ResourceError where the variable that holds it is not set."""
        uri: str | None = dereference(self.uri, "tracking.uri")
        return uri
