"""Offline training: checks and imports data of one's own, and trains on it."""

from __future__ import annotations

from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion


@recipe("warmup")
def offline(run: Run, spec: ExperimentSpec) -> PolicyVersion:
    """Train `algorithm` on the data of `data`, after a `warmup` if there is one; evaluate before and after."""
    policy, _ = run.warm_up(run.begin(pretrains=True))
    return run.train([run.import_data()], spec.algorithm.name, algorithm=spec.algorithm, start=policy)
