"""Budget of a run: the maximum cost and time of its stages."""

from __future__ import annotations

from pydantic import Field

from components.specs import Spec


class BudgetSpec(Spec):
    """Maximum cost and time of a run. The run ends before a stage that is expected to exceed it. It does not affect
    results, so it is in no stage key."""

    cost: float | None = Field(None, gt=0)
    """Maximum cost of machines, judges and teachers, in the currency of `compute.price`. null: no limit."""
    hours: float | None = Field(None, gt=0)
    """Maximum time of the stages, in hours. null: no limit."""

    @property
    def is_set(self) -> bool:
        """True if there is a limit."""
        return self.cost is not None or self.hours is not None
