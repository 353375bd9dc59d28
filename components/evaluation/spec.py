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
    environments: int | None = Field(None, ge=1)
    """Most instances of the environment at once. None: one for each episode, or as many as the environment says."""
    max_failures: float = Field(0.1, ge=0)
    """Below 1: share of the episodes that may fail; from 1: how many."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that one episode may take."""
    step_timeout: float | None = Field(None, gt=0)
    """Seconds that the environment may take for one step, or to reset. None: no limit but `timeout`."""
    retries: int = Field(2, ge=0)
    """How often an episode is played again whose environment was away."""
