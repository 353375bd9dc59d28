"""Presentation of a stage in MLflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StageTracking:
    """Presentation of a stage in MLflow."""

    prefix: str | None = None
    """Prefix of the names of its metrics; None: the name of the stage."""
    dataset: Literal["train", "evaluation"] | None = None
    """Context in which its artifact is listed as a dataset; None: it is no dataset."""
    model: bool = False
    """True if its artifact is listed as a model."""
    traces: bool = False
    """True if its episodes and their scores are logged as traces."""


METRICS_ONLY = StageTracking()
"""Presentation of a stage with metrics only."""
