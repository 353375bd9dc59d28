"""Repetition of a run whose stages are all cached. Nothing runs, so no Prefect server is started. If an earlier run has
the same configuration and the same artifacts, its results are printed again: its record, its MLflow run and its report
are up to date.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from components.artifacts import Artifact
from components.errors import GuardTriggered
from components.redaction import mask
from flows.execution.executor import Execution, FinishedStage
from flows.experiment.spec import ExperimentSpec
from flows.experiment.starting_point import StartingPoint
from flows.history.records import Records, RunRecord
from flows.recipes.run import Run
from flows.reporting.console_lines import round_teller
from flows.reporting.report import load_evaluations
from flows.reporting.results import ReleaseResult, Results, results_of
from flows.stages.base import Context, Request
from flows.stages.execute import find_stage
from flows.terminal.console import Console


class _NotCached(Exception):
    """Signal that a stage must run."""


@dataclass(frozen=True)
class CachedRun:
    """Run whose stages are all cached."""

    spec: ExperimentSpec
    context: Context
    start: StartingPoint
    stages: Mapping[str, FinishedStage]
    """Stages by label."""

    @classmethod
    def find(cls, spec: ExperimentSpec, context: Context, start: StartingPoint) -> Self | None:
        """Return the run if all of its stages are cached; None if one must run, a guard ends the run, or a person must
        approve."""
        if spec.deploy.approve:
            return None
        stages: dict[str, FinishedStage] = {}

        def call(label: str, step: int, request: Request) -> Artifact:
            artifact = find_stage(request, context)
            if artifact is None:
                raise _NotCached
            stages[label] = FinishedStage(label, step, artifact, "cached", 0.0, request, time.monotonic())
            return artifact

        try:
            Run(spec, call, start=start).execute()
        except (_NotCached, GuardTriggered):
            return None
        return cls(spec, context, start, stages)

    def earlier(self) -> RunRecord | None:
        """Return the latest finished run with the same configuration and artifacts whose report still exists, else
        None. Return None also with a deployment target, whose state may have changed."""
        spec = self.spec
        if spec.deploy.target is not None:
            return None
        data = json.loads(json.dumps(mask(spec.model_dump(mode="json", by_alias=True))))
        keys = {label: done.artifact.key for label, done in self.stages.items()}
        return next(
            (
                run
                for run in Records(spec.root).all()
                if (run.status, run.name, run.seed, run.sweep) == ("FINISHED", spec.name, spec.seed, None)
                and run.result is not None
                and (run.spec, run.forked) == (data, self.start.checkpoints)
                and {stage.label: stage.key for stage in run.stages} == keys
                and _report_exists(run.result["report"])
            ),
            None,
        )

    def repeat(self, earlier: RunRecord, console: Console, log: Path, started: float) -> Results:
        """Print the lines of the run. Return its results, with the release recorded by an earlier run.

        started: time of the start by the monotonic clock, in seconds."""
        execution = Execution(self.spec, self.context, console, None, log)

        def call(label: str, step: int, request: Request) -> Artifact:
            execution.tell(self.stages[label])
            return self.stages[label].artifact

        run = Run(self.spec, call, start=self.start, on_round=round_teller(execution), on_notice=execution.notice)
        run.execute()
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(earlier.started))
        console.line(
            f"nothing has changed since run {earlier.short} of {date}: its report and its MLflow run are up to date"
        )
        assert earlier.result is not None
        release = ReleaseResult(**{name: earlier.result[name] for name in ("policy_digest", "model", "champion")})
        return results_of(
            execution,
            run.outcome,
            load_evaluations(self.spec, run.outcome),
            earlier.id,
            release,
            seconds=time.monotonic() - started,
            report=earlier.result["report"],
            export=earlier.result["export"],
        )


def _report_exists(report: str) -> bool:
    """Return True if a report exists as a file or is a URL, whose existence only MLflow can check."""
    return "://" in report or os.path.isfile(report)
