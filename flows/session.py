"""Session of one run of an experiment, around its recipe.

`run` checks the prerequisites, opens the terminal (console, log, signals) and the services (Prefect, MLflow, record),
executes the recipe, registers and releases the trained policy, and prints the results. A run that is cached as a whole
opens no service.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError, GuardTriggered
from components.redaction import refuse_secrets
from flows.execution import notification
from flows.execution.overlap import BackgroundRunner, Sequential
from flows.execution.parallel import ParallelRunner, in_turn
from flows.experiment import fork, run_models
from flows.experiment.prerequisites import check_keys, check_model, refuse
from flows.experiment.prompts import check_prompts
from flows.experiment.spec import ExperimentSpec
from flows.experiment.starting_point import StartingPoint
from flows.history.records import Records, RunRecord, recording
from flows.recipes.rehearsal import rehearse
from flows.recipes.run import Run
from flows.recipes.stage_calls import Prune
from flows.release import approval, deployment
from flows.stages.base import Context, StageRunner
from flows.terminal.overrides import mask_overrides

if TYPE_CHECKING:
    from components.tracking.mlflow_tracker import Tracker
    from flows.execution.executor import Execution
    from flows.orchestration.prefect_log import PrefectLog
    from flows.orchestration.server import Api
    from flows.planning.budget import RunBudget
    from flows.reporting.results import Results
    from flows.terminal.console import Console
    from flows.terminal.interrupt import Interruption

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Checked:
    """Experiment whose prerequisites hold."""

    spec: ExperimentSpec
    overrides: list[str]
    sweep: str | None
    context: Context
    starting_point: StartingPoint
    budget: RunBudget | None
    started: float
    """Start of the run by the monotonic clock, in seconds."""

    @property
    def root(self) -> Path:
        return Path(self.spec.root)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


@dataclass(frozen=True)
class _Terminal:
    """Console, log file and handling of signals."""

    console: Console
    log: Path
    prefect_log: PrefectLog
    interruption: Interruption


@dataclass(frozen=True)
class _Services:
    """Prefect server and execution with its tracker and record."""

    prefect: Api | None
    """None if all stages are cached and no server of the user is set."""
    tracker: Tracker
    records: Records
    dead: list[RunRecord]
    """Runs of killed processes."""
    execution: Execution


def run(
    spec: ExperimentSpec,
    *,
    overrides: Sequence[str] = (),
    sweep: str | None = None,
    prune: Prune = lambda measured: None,
) -> dict[str, Any]:
    """Run the experiment as a Prefect flow. Print a table of results on stderr and one JSON object as the last line on
    stdout; return this object.

    sweep: id of the sweep that the run belongs to; its MLflow run becomes a child of the sweep's. prune: see
    `flows.recipes.Run`. Raises SpecError, ResourceError, the errors of stages, and KeyboardInterrupt after a signal.
    """
    from components.tracking.store import local_uri, ui_command
    from flows.orchestration import server

    checked = _check(spec, overrides, sweep)
    stdout = sys.stdout
    undeployed: list[EspalierError] = []
    with ExitStack() as stack:
        terminal = _open_terminal(checked, stack)

        from flows.planning import engines, notes, preflight
        from flows.planning.cached_run import CachedRun
        from flows.reporting import console_lines

        spec = checked.spec
        cached = CachedRun.find(spec, checked.context, checked.starting_point)
        if cached is None:
            pending = preflight.check(spec, checked.context, checked.starting_point)
            for note in (*notes.place_notes(spec), *engines.engine_notes(spec, pending)):
                terminal.console.line(note)
        standalone = sweep is None and not server.inside_flow()  # a sweep and Prefect expect a new run
        earlier = cached.earlier() if cached is not None and standalone else None
        if cached is not None and earlier is not None:
            result = cached.repeat(earlier, terminal.console, terminal.log, checked.started)
            mlflow_command = ui_command(spec.tracking.uri or local_uri(checked.root))
        else:
            services = _open_services(checked, terminal, stack, needs_server=cached is None)
            result = _execute(checked, terminal, services, prune, undeployed)
            mlflow_command = services.tracker.ui_command
        console_lines.show(result, terminal.console, mlflow_command, server.ui_command(checked.root))
    print(result.to_json(), file=stdout, flush=True)
    if undeployed:
        raise undeployed[0]  # the trained policy is stored and registered, but not deployed
    line: dict[str, Any] = json.loads(result.to_json())
    return line


def _check(spec: ExperimentSpec, overrides: Sequence[str], sweep: str | None) -> _Checked:
    """Check everything that needs no weights and no service. Raises SpecError and ResourceError."""
    from components.tracking.store import check as check_tracking
    from components.tracking.store import local_uri

    started = time.monotonic()
    root = Path(spec.root)
    refuse_secrets(spec.model_dump(mode="json", by_alias=True))
    if spec.fork is not None:
        fork.named(spec, spec.fork.partition("@")[0])  # before any file is created below the root
    check_keys(spec)
    refuse(notification.lacking(spec))
    approval.check(spec)
    context = Context.created(root, spec.store, lock_timeout=spec.compute.lock_timeout)
    check_tracking(spec.tracking.uri or local_uri(root))
    context.store.check()
    spec = run_models.resolve(spec, context.store)
    starting_point = StartingPoint.resolve(spec, context.store)
    rehearse(spec, starting_point)
    budget = None
    if spec.budget.is_set:
        from flows.planning.budget import RunBudget
        from flows.planning.plan import plan

        budget = RunBudget(spec, plan(spec))
        budget.refuse_first()
    return _Checked(spec, mask_overrides(overrides), sweep, context, starting_point, budget, started)


def _open_terminal(checked: _Checked, stack: ExitStack) -> _Terminal:
    """Handle signals, check weights and deployment, and start console and log. Raises ResourceError."""
    from components.models.weights import check_weights
    from flows.orchestration.prefect_log import PrefectLog
    from flows.terminal.console import Console, hush, logging_to
    from flows.terminal.interrupt import Interruption

    spec, context = checked.spec, checked.context
    hush()
    interruption = stack.enter_context(Interruption())
    for model in (spec.model, *spec.teachers(), *spec.judges()):
        check_weights(model, context.cache)
    check_model(spec, context.cache)
    check_prompts(spec, context.cache, prepares=True)
    if spec.deploy.mode != "none" and spec.deploy.target is not None:
        deployment.check(spec)
    stack.enter_context(redirect_stdout(sys.stderr))  # stdout is for the result only
    console = Console()
    log = checked.root / "logs" / f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    stack.enter_context(logging_to(log, console))
    prefect_log = stack.enter_context(PrefectLog())
    console.line(f"{spec.name}, seed {spec.seed}; log: {log}")
    if (excess := spec.collect.excess_overlap(spec.rounds)) is not None:
        console.line(f"warning: {excess}")
    logger.info("overrides: %s", " ".join(checked.overrides) or "none")
    if (forked := checked.starting_point.fork) is not None:
        console.line(f"starts from the policy of run {forked.run.short} after step {forked.step}")
    stack.callback(context.warm.close)
    return _Terminal(console, log, prefect_log, interruption)


def _open_services(checked: _Checked, terminal: _Terminal, stack: ExitStack, *, needs_server: bool) -> _Services:
    """Start Prefect, tracking, the record and the execution. needs_server: False if all stages are cached."""
    from flows.orchestration import server

    spec, interruption = checked.spec, terminal.interruption
    prefect = None
    if needs_server or server.of_user():
        prefect = stack.enter_context(server.for_run(checked.root, keep=checked.sweep is not None))
        interruption.last_words.append(prefect.kill)  # the server starts during the imports
        stack.callback(terminal.prefect_log.stop)  # before the server stops
    services = "" if prefect is None else " and starting Prefect"
    terminal.console.line(f"loading packages{services}; the first stage also loads the model")
    from flows.execution import tracking
    from flows.execution.executor import Execution
    from flows.orchestration.task_runners import TaskRunners

    tracker = stack.enter_context(tracking.track(spec, checked.overrides, checked.sweep))
    interruption.last_words.append(lambda: tracker.finish("KILLED"))
    records = Records(checked.root)
    dead = tracking.close_dead(records, tracker, spec.tracking.uri)
    starting = tracking.new_record(
        spec, checked.overrides, tracker.run_id, sweep=checked.sweep, forked=checked.starting_point.checkpoints
    )
    record = stack.enter_context(recording(checked.root, starting))
    task_runners = TaskRunners()
    stack.callback(task_runners.close)
    execution = Execution(spec, checked.context, terminal.console, tracker, terminal.log, record, task_runners.submit)
    stack.callback(execution.close)
    if execution.notifier is not None:
        stack.enter_context(execution.notifier.watching())
    logger.info("MLflow run %s", tracker.run_id)
    return _Services(prefect, tracker, records, dead, execution)


def _execute(
    checked: _Checked, terminal: _Terminal, services: _Services, prune: Prune, undeployed: list[EspalierError]
) -> Results:
    """Execute the recipe, register and release its policy, and return the results, which the record gets, too.
    undeployed: gets the error of a deployment that was rolled back."""
    from flows.orchestration import prefect_artifacts, tasks
    from flows.release import registration
    from flows.reporting import console_lines, report, results

    spec, execution, budget = checked.spec, services.execution, checked.budget
    on_round = console_lines.round_teller(execution)

    def body(call: StageRunner, beside: BackgroundRunner, at_once: ParallelRunner) -> Results:
        if budget is not None:

            def show(text: str) -> None:
                prefect_artifacts.spent(text, spec.name)

            call = budget.guard(call, execution, lambda: outcome, show)
            at_once = budget.guard_branches(at_once, execution, lambda: outcome, show)
        start = checked.starting_point
        recipe_run = Run(spec, call, beside, start, on_round, execution.notice, prune, at_once=at_once)
        if spec.deploy.approve:
            recipe_run.approve = approval.asker(execution)
        outcome = recipe_run.outcome
        try:
            recipe_run.execute()
        except GuardTriggered as guard:
            report.log_stopped_report(execution, outcome, checked.overrides, checked.seconds, str(guard))
            raise
        released, error = registration.register(execution, outcome)
        if error is not None:
            undeployed.append(error)
        return results.conclude(execution, outcome, checked.overrides, released, seconds=checked.seconds)

    if services.prefect is None:
        result = body(execution.artifact, Sequential(execution.artifact), in_turn(execution.artifact))
    else:
        result = tasks.run_flow(
            spec.flow.title,
            execution,
            body,
            services.prefect,
            terminal.interruption,
            services.dead,
            services.records.close,
            terminal.prefect_log,
        )
    assert execution.record is not None
    execution.record.run.result = json.loads(result.to_json())
    return result
