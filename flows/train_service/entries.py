"""Models of clients as the service lists them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flows.train_service.bodies import LoraConfig
from flows.train_service.trainer import Model


@dataclass
class ModelEntry:
    """Model of a session, and its requests. The fields that `saved` returns are on disk."""

    id: str
    base: str
    config: LoraConfig
    state: str
    applied: int = 0
    """Number of the last request that changed the state."""
    answer: dict[str, Any] | None = None
    """Answer to that request."""
    metadata: dict[str, Any] | None = None
    created: float = 0.0
    run: str = ""
    """Id of its run in `flows.runs`; empty if runs are not recorded."""
    steps: int = 0
    """Number of its optimizer steps."""
    next: int = 1
    """Number of the next request to run."""
    arrived: dict[int, float] = field(default_factory=dict)
    """Requests that wait for their turn, with the time of their arrival."""
    model: Model | None = None
    """None: not in memory."""

    @property
    def content(self) -> dict[str, Any]:
        """Data of a checkpoint of the model."""
        return {"base": self.base, "config": self.config.model_dump(), "state": self.state}

    def saved(self) -> dict[str, Any]:
        names = ("id", "applied", "answer", "metadata", "created", "run", "steps")
        return self.content | {name: getattr(self, name) for name in names}
