"""Episodes of a run on their way from collection to training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from components.artifacts import Artifact
from components.errors import Problem, SpecError

FED = ("trajectories", "scores", "selection")
"""Names of the training inputs: the artifacts of collect, judge and filter."""


@dataclass(frozen=True)
class Episodes:
    """Episodes of one collection, with their scores and their selection as far as they exist."""

    name: str
    """Name in the labels of the stages: `collect[NAME]`, `judge[NAME]`, `filter[NAME]`."""
    step: int
    trajectories: Artifact
    scores: Artifact | None = None
    selection: Artifact | None = None

    @classmethod
    def of(cls, name: str, step: int, artifact: Artifact) -> Episodes:
        """Return the episodes of an artifact that holds trajectories, scores and selection, such as imported data."""
        return cls(name, step, artifact, artifact, artifact)

    @property
    def success(self) -> float:
        """Success rate; 0 if it is unknown: in a plan, or without a finished episode."""
        return self.trajectories.metrics.get("success", 0.0)

    def inputs(self) -> dict[str, Artifact]:
        """Return the artifacts by name of the training input. Raises SpecError without scores or selection."""
        missing = [step for step, value in (("judge", self.scores), ("filter", self.selection)) if value is None]
        if missing:
            calls = " and ".join(f"run.{step}" for step in missing)
            raise order_error(f"trains on the episodes {self.name}, which did not pass {calls}; call it before train")
        assert self.scores is not None
        assert self.selection is not None
        return dict(zip(FED, (self.trajectories, self.scores, self.selection), strict=True))


def training_inputs(data: Sequence[Episodes]) -> dict[str, Artifact]:
    """Return the training inputs of several collections: the first `trajectories`, the next `trajectories+1`, and so
    on. Raises SpecError if there is none, or one without scores or selection."""
    if not data:
        raise order_error("trains on no episodes; collect or import some before train")
    inputs: dict[str, Artifact] = {}
    for number, episodes in enumerate(data):
        suffix = f"+{number}" if number else ""
        inputs |= {f"{name}{suffix}": artifact for name, artifact in episodes.inputs().items()}
    return inputs


def order_error(message: str) -> SpecError:
    """Return the error of a recipe that calls stages in an impossible order."""
    return SpecError([Problem("flow", message)])
