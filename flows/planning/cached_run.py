"""Repetition of a run whose stages are all cached. Nothing runs, so no Prefect server is started. If an earlier run has
the same configuration and the same artifacts, its results are printed again: its record, its MLflow run and its report
are up to date.
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
from flows.experiment.feedback import FeedbackData
from flows.experiment.fork import Fork
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Records, RunRecord
from flows.recipes.online_rl import online_rl
from flows.recipes.outcome import RunOutcome
from flows.reporting.results import Results, results_of, round_teller
from flows.stages.base import Context, Request
from flows.stages.execute import find_stage
from flows.terminal.console import Console

Stages = Mapping[str, Done]
"""Stages of a run by label."""


class _NotCached(Exception):
    """Signal that a stage must run."""


def cached_stages(
    spec: ExperimentSpec, context: Context, begin: Fork | None, feedback: FeedbackData | None
) -> Stages | None:
    """Return the stages of a run if all are cached; None if one must run, a guard ends the run, or a person must
    approve."""
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
        online_rl(spec, call, begin=begin, feedback=feedback)
    except (_NotCached, GuardStruck):
        return None
    return stages


def same_run(spec: ExperimentSpec, begin: Fork | None, stages: Stages) -> RunRecord | None:
    """Return the latest finished run with the same configuration and artifacts whose report still exists, else None.
    Return None also with a deployment target, whose state may have changed."""
    if spec.deploy.target is not None:
        return None
    data = json.loads(json.dumps(mask(spec.model_dump(mode="json", by_alias=True))))
    keys = {label: done.artifact.key for label, done in stages.items()}
    forked = begin.checkpoints if begin is not None else {}
    return next(
        (
            run
            for run in Records(spec.root).all()
            if (run.status, run.name, run.seed, run.sweep) == ("FINISHED", spec.name, spec.seed, None)
            and run.result is not None
            and (run.spec, run.forked) == (data, forked)
            and {stage.label: stage.key for stage in run.stages} == keys
            and _report_exists(run.result["report"])
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
    feedback: FeedbackData | None,
    started: float,
) -> Results:
    """Print the lines of a run whose stages are cached. Return its results, with the export recorded by an earlier run.

    run: the earlier run. started: time of the start by the monotonic clock, in seconds."""
    execution = Execution(spec, context, console, None, log)

    def call(label: str, step: int, request: Request) -> Any:
        execution.tell(stages[label])
        return stages[label].artifact

    outcome = RunOutcome()
    online_rl(spec, call, round_teller(execution), begin, execution.notice, feedback=feedback, outcome=outcome)
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    console.line(f"nothing has changed since run {run.short} of {date}: its report and its MLflow run are up to date")
    assert run.result is not None
    recorded = {name: run.result[name] for name in ("policy_digest", "report", "export", "model", "champion")}
    return results_of(execution, outcome, run.id, seconds=time.monotonic() - started, **recorded)


def _report_exists(report: str) -> bool:
    """Return True if a report exists as a file or is a URL, whose existence only MLflow can check."""
    return "://" in report or os.path.isfile(report)
