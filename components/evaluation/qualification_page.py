"""Qualification of an environment as data and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.evaluation.examples import view
from components.evaluation.page import page
from components.redaction import mask_text
from components.trajectories.schema import Trajectory

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
DESCRIPTIONS = {
    "solver": "The environment's own solutions succeed",
    "chance": "Random actions rarely succeed",
    "replay": "Equal actions give equal observations, rewards and outcomes",
    "isolation": "Two instances whose episodes alternate do not influence each other",
    "restore": "A saved state continues as the episode did",
    "splits": "Held-out scenarios are no training scenarios, and no training solution solves them",
    "exploits": "Cheap exploits earn nothing",
    "agreement": "The recorded actions give the same success in a new instance",
    "length": "Solutions fit model.max_length and agent.max_turns",
}
"""Property that each check holds."""


@dataclass(frozen=True)
class QualificationCheck:
    """Result of one check."""

    name: str
    status: str
    """`passed`, `failed` or `skipped`."""
    reason: str = ""
    """Cause of a failed or a skipped check."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    examples: Sequence[Trajectory] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON data, with its examples by id."""
        return {
            "name": self.name,
            "status": self.status,
            "reason": mask_text(self.reason),
            "figures": dict(self.figures),
            "examples": [example.id for example in self.examples],
        }


def passed(checks: Sequence[QualificationCheck]) -> bool:
    """Return True if no check failed."""
    return all(check.status != FAILED for check in checks)


def render(environment: str, checks: Sequence[QualificationCheck], created: str, overrides: Sequence[str]) -> str:
    """Return the page as HTML text. environment: import path of its class."""
    return page(
        "qualification.html.j2",
        environment=environment,
        created=created,
        passed=passed(checks),
        rows=[(check, DESCRIPTIONS[check.name], [view(item) for item in check.examples]) for check in checks],
        overrides=[mask_text(override) for override in overrides],
    )
