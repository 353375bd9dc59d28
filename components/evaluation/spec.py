"""How a policy is evaluated."""

from __future__ import annotations

from pydantic import Field

from components.specs import Spec


class EvaluateSpec(Spec):
    split: str = "heldout"
    """Split of the environment that is measured; it shares no scenario with train."""
    scenarios: int | None = Field(None, ge=1)
    """How many, from the first on; None takes all."""
    every: int = Field(0, ge=0)
    """The policy is also evaluated after rounds `every`, 2 · `every` and so on; 0: only before and after the rounds."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    concurrency: int = Field(64, ge=1)
    """Episodes in flight at once."""
    max_failures: float = Field(0.1, ge=0)
    """As in collect."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that one episode may take."""
