"""Offline training: checks and imports data of one's own, and trains on it."""

from __future__ import annotations

from components.errors import SpecError
from flows.experiment.data_kinds import imitates_rejected, learns_nothing
from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.episodes import Episodes
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion


@recipe("warmup", "fork", "data", offline=True)
def offline(run: Run, spec: ExperimentSpec) -> PolicyVersion:
    """Train `algorithm` on the data of `data` that `filter` selects: from the base model, the policy of `fork`, or that
    after a `warmup` on demonstrations. Measure it before and after on held-out rows of the data, and in `environment`
    if it is set. Raises SpecError if the algorithm learns nothing from the data, or would imitate rejected answers."""
    data = run.filter(run.import_data())
    _check_imitation(spec, data)
    _check_comparisons(spec, data)
    policy, _ = run.warm_up(run.begin(pretrains=True))
    run.validate(data, policy, "before", policy.step - 1)
    policy = run.train([data], "data", algorithm=spec.algorithm, start=policy)
    if policy.checkpoint is not None and policy.checkpoint.metrics.get("skipped"):
        raise SpecError([learns_nothing(spec.algorithm)])
    run.validate(data, policy, "after")
    return policy


def _check_comparisons(spec: ExperimentSpec, data: Episodes) -> None:
    """Raise SpecError if the algorithm compares answers to one prompt, and no prompt has answers of different rewards.
    In a plan the number is unknown."""
    if spec.algorithm.feedback_kinds == ("choices",) and data.trajectories.metrics.get("comparable") == 0:
        raise SpecError([learns_nothing(spec.algorithm)])


def _check_imitation(spec: ExperimentSpec, data: Episodes) -> None:
    """Raise SpecError if the algorithm would imitate rejected answers, because the filter drops none. In a plan
    the number is unknown."""
    assert data.selection is not None
    rejected = data.trajectories.metrics.get("rejected", 0.0)
    if spec.algorithm.imitates and rejected and data.selection.metrics.get("dropped") == 0:
        raise SpecError([imitates_rejected(spec.algorithm, rejected)])
