"""Offline training: checks and imports data of one's own, and trains on it."""

from __future__ import annotations

from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion


@recipe("warmup", "fork", "data")
def offline(run: Run, spec: ExperimentSpec) -> PolicyVersion:
    """Train `algorithm` on the data of `data`: from the base model, the policy of `fork`, or that after a `warmup` on
    demonstrations. Evaluate before and after."""
    policy, _ = run.warm_up(run.begin(pretrains=True), source=run.demonstrations)
    return run.train([run.import_data()], "data", algorithm=spec.algorithm, start=policy)
