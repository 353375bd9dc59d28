"""When the rounds end before their number, and which of the evaluated policies is the final one.

Both are decided from held-out measurements of the policies of one run, in order of training: the one at the start of
the rounds first. The decisions are functions of these numbers alone, so the same command decides the same. A value of
None is not known: its evaluation is not made yet (in a plan), or measured nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from components.artifacts import Artifact
from components.specs import Spec

Metric = Literal["success", "reward"]


class EarlyStoppingSpec(Spec):
    """Ends the rounds when training has stopped to help on held-out scenarios."""

    patience: int = Field(ge=1)
    """Evaluations that may pass without a gain."""
    metric: Metric = "success"
    """Held-out measure that has to rise; by the same one `deploy.policy: best` chooses."""
    min_gain: float = Field(0.0, ge=0)
    """A rise counts only above this, in the unit of the metric."""


@dataclass(frozen=True)
class Measured:
    """A policy that was evaluated in the rounds, or at their start."""

    step: int
    """The round after which the policy stood; 0 at the start of the rounds (of a fork, the step where it begins)."""
    checkpoint: Artifact | None
    """None for the base model."""
    evaluation: Artifact

    @property
    def made(self) -> bool:
        """Whether the evaluation is there; in a plan it may not be, and then it has no digest."""
        return self.evaluation.digest != ""

    def value(self, metric: Metric) -> float | None:
        return self.evaluation.metrics.get(metric)


def should_stop(values: Sequence[float | None], patience: int, min_gain: float) -> bool:
    """Whether none of the last `patience` values is more than `min_gain` above the best before them. False where one of
    these is not known."""
    before = [value for value in values[:-patience] if value is not None]
    last = [value for value in values[-patience:] if value is not None]
    if not before or len(last) < patience:
        return False
    return max(last) <= max(before) + min_gain


def best_of(values: Sequence[float | None]) -> int | None:
    """Place of the highest value, of equal ones the earliest; None where none is known."""
    known = [(value, -place) for place, value in enumerate(values) if value is not None]
    return -max(known)[1] if known else None


def why_stop(measured: Sequence[Measured], rule: EarlyStoppingSpec) -> str | None:
    """Why the rounds end after the last of these evaluations, in words; None where they go on."""
    values = [one.value(rule.metric) for one in measured]
    if not should_stop(values, rule.patience, rule.min_gain):
        return None
    before = best_of(values[: -rule.patience])
    assert before is not None
    last = ", ".join(f"{value:.3f}" for value in values[-rule.patience :])
    gain = f" by more than {rule.min_gain:g}" if rule.min_gain else ""
    times = "evaluation" if rule.patience == 1 else f"{rule.patience} evaluations"
    return (
        f"the rounds end after round {measured[-1].step}: held-out {rule.metric} has not risen{gain} above "
        f"{values[before]:.3f} (step {measured[before].step}) in the last {times} ({last})"
    )


def choose(measured: Sequence[Measured], metric: Metric) -> Measured:
    """The best policy that has a checkpoint, of equal ones the earliest; the last one where an evaluation is not made
    yet, or none could be measured. The last one must have a checkpoint."""
    candidates = [one for one in measured if one.checkpoint is not None]
    best = best_of([one.value(metric) for one in candidates])
    return candidates[best] if best is not None and all(one.made for one in candidates) else measured[-1]
