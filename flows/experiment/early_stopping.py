"""Early stopping of the rounds, and the choice of the final policy.

Both use held-out evaluations of the policies of one run, in order of training, beginning with the policy at the start
of the rounds. Both are functions of these numbers alone, so they are deterministic. A value of None is unknown: the
evaluation has not run yet (in a plan), or no episode could be measured.
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
    """Early stopping when training no longer improves a held-out metric."""

    patience: int = Field(ge=1)
    """Number of evaluations without a gain after which the rounds end."""
    metric: Metric = "success"
    """Held-out metric that must rise; `deploy.policy: best` uses the same metric. If no episode states its success, it
    is the reward."""
    min_gain: float = Field(0.0, ge=0)
    """Minimum rise that counts as a gain, exclusive, in the unit of the metric."""


@dataclass(frozen=True)
class EvaluatedPolicy:
    """Policy with its evaluation, during the rounds or at their start."""

    step: int
    """Round after which the policy was evaluated; 0 at the start of the rounds (in a fork: the step of the fork)."""
    checkpoint: Artifact | None
    """Checkpoint of the policy; None for the base model."""
    evaluation: Artifact

    @property
    def exists(self) -> bool:
        """True if the evaluation exists; in a plan it may be pending, and then it has no digest."""
        return self.evaluation.digest != ""

    def value(self, metric: Metric) -> float | None:
        return self.evaluation.metrics.get(metric)


def measured_metric(measured: Sequence[EvaluatedPolicy], metric: Metric) -> Metric:
    """Return the metric; the reward in place of a success that no evaluation measures."""
    unknown = all(policy.exists and policy.value(metric) is None for policy in measured)
    return "reward" if unknown else metric


def should_stop(values: Sequence[float | None], patience: int, min_gain: float) -> bool:
    """Return True if none of the last `patience` values is more than `min_gain` above the best before them; False if
    one of the last values is unknown."""
    before = [value for value in values[:-patience] if value is not None]
    last = [value for value in values[-patience:] if value is not None]
    if not before or len(last) < patience:
        return False
    return max(last) <= max(before) + min_gain


def best_of(values: Sequence[float | None]) -> int | None:
    """Return the index of the highest value, the earliest of equal ones; None if no value is known."""
    candidates = [(value, -index) for index, value in enumerate(values) if value is not None]
    return -max(candidates)[1] if candidates else None


def why_stop(measured: Sequence[EvaluatedPolicy], rule: EarlyStoppingSpec) -> str | None:
    """Return a message on why the rounds end after the last of these evaluations; None if they continue."""
    metric = measured_metric(measured, rule.metric)
    values = [policy.value(metric) for policy in measured]
    if not should_stop(values, rule.patience, rule.min_gain):
        return None
    before = best_of(values[: -rule.patience])
    assert before is not None
    last = ", ".join(f"{value:.3f}" for value in values[-rule.patience :])
    gain = f" by more than {rule.min_gain:g}" if rule.min_gain else ""
    times = "evaluation" if rule.patience == 1 else f"{rule.patience} evaluations"
    return (
        f"the rounds end after round {measured[-1].step}: held-out {metric} has not risen{gain} above "
        f"{values[before]:.3f} (step {measured[before].step}) in the last {times} ({last})"
    )


def choose(measured: Sequence[EvaluatedPolicy], metric: Metric) -> EvaluatedPolicy:
    """Return the best policy that has a checkpoint, the earliest of equal ones. Return the last policy if an evaluation
    is pending or no value is known. The last policy must have a checkpoint."""
    metric = measured_metric(measured, metric)
    candidates = [policy for policy in measured if policy.checkpoint is not None]
    best = best_of([policy.value(metric) for policy in candidates])
    return candidates[best] if best is not None and all(policy.exists for policy in candidates) else measured[-1]
