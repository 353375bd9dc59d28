"""A run of which every stage is in the store. Nothing runs, so no Prefect server is started; and where an earlier run
has the same configuration and the same artifacts, it is shown as it was: MLflow, its record and its report say already
what there is to say.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.errors import GuardStruck
from components.redaction import mask
from flows.execution.executor import Done, Execution
from flows.experiment.feedback import Said
from flows.experiment.fork import Fork
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Records, RunRecord
from flows.recipes.online_rl import online_rl
from flows.recipes.outcome import Outcome
from flows.reporting.results import Results, results_of, round_teller
from flows.stages.base import Context, Request
from flows.stages.execute import find_stage
from flows.terminal.console import Console

Stages = Mapping[str, Done]
"""The stages of a run by their labels."""


class _NotCached(Exception):
    """A stage has to run."""


def cached_stages(spec: ExperimentSpec, context: Context, begin: Fork | None, said: Said | None) -> Stages | None:
    """Return the stages of a run where all are cached; None where one has to run, a guard stops, or a person has to be
    asked."""
    if spec.deploy.approve:
        return None
    stages: dict[str, Done] = {}

    def call(label: str, step: int, request: Request) -> Any:
        artifact = find_stage(request, context)
        if artifact is None:
            raise _NotCached
        stages[label] = Done(label, step, artifact, "cached", 0.0, request, time.monotonic())
        return artifact

    try:
        online_rl(spec, call, begin=begin, said=said)
    except (_NotCached, GuardStruck):
        return None
    return stages


def same_run(spec: ExperimentSpec, begin: Fork | None, stages: Stages) -> RunRecord | None:
    """Return the latest finished run with the same configuration and artifacts, whose report is still there; None where
    there is none, or where something is to be deployed, which may have changed since."""
    if spec.deploy.target is not None:
        return None
    wanted = json.loads(json.dumps(mask(spec.model_dump(mode="json", by_alias=True))))
    keys = {label: done.artifact.key for label, done in stages.items()}
    forked = begin.checkpoints if begin is not None else {}
    return next(
        (
            run
            for run in Records(spec.root).all()
            if (run.status, run.name, run.seed, run.sweep) == ("FINISHED", spec.name, spec.seed, None)
            and run.result is not None
            and (run.spec, run.forked) == (wanted, forked)
            and {stage.label: stage.key for stage in run.stages} == keys
            and _is_there(run.result["report"])
        ),
        None,
    )


def repeat(
    spec: ExperimentSpec,
    context: Context,
    console: Console,
    log: Path,
    stages: Stages,
    run: RunRecord,
    begin: Fork | None,
    said: Said | None,
    started: float,
) -> Results:
    """Print the lines of a run whose stages are cached; return its results, with what an earlier run recorded about the
    export. started: by the monotonic clock."""
    execution = Execution(spec, context, console, None, log)

    def call(label: str, step: int, request: Request) -> Any:
        execution.tell(stages[label])
        return stages[label].artifact

    outcome = Outcome()
    online_rl(spec, call, round_teller(execution), begin, execution.notice, said=said, outcome=outcome)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    console.line(f"nothing has changed since run {run.short} of {when}: its report and its MLflow run are up to date")
    assert run.result is not None
    recorded = {name: run.result[name] for name in ("policy_digest", "report", "export", "model", "champion")}
    return results_of(execution, outcome, run.id, seconds=time.monotonic() - started, **recorded)


def _is_there(report: str) -> bool:
    """Return whether a report can be opened; of one on a server, only MLflow knows."""
    return "://" in report or os.path.isfile(report)
