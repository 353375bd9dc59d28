"""Session of one run of an experiment, around its recipe.

`run` checks the prerequisites, starts the Prefect server, MLflow tracking, the console and the record, runs the recipe,
registers and releases the trained policy, and prints the results.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from components.errors import EspalierError, GuardTriggered
from components.redaction import refuse_secrets
from flows.execution import notification
from flows.execution.overlap import BackgroundRunner, Sequential
from flows.execution.parallel import ParallelRunner, in_turn
from flows.experiment import fork, teachers
from flows.experiment.prerequisites import check_keys, refuse
from flows.experiment.requests import StageRunner
from flows.experiment.spec import ExperimentSpec
from flows.experiment.starting_point import StartingPoint
from flows.history.records import Records, RunRecord, recording
from flows.recipes.rehearsal import rehearse
from flows.recipes.run import Run
from flows.recipes.stage_calls import Prune
from flows.release import approval, deployment
from flows.stages.base import Context
from flows.terminal.arguments import CODE
from flows.terminal.overrides import mask_overrides

logger = logging.getLogger(__name__)


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
    from components.models.weights import check_weights
    from components.tracking.provenance import git_commit, package_versions
    from components.tracking.store import check as check_tracking
    from components.tracking.store import local_uri, ui_command
    from flows.orchestration import server
    from flows.orchestration.prefect_log import PrefectLog
    from flows.terminal.console import Console, hush, logging_to
    from flows.terminal.interrupt import Interruption

    start = time.monotonic()
    root = Path(spec.root)
    refuse_secrets(spec.model_dump(mode="json", by_alias=True))
    overrides = mask_overrides(overrides)
    if spec.fork is not None:
        fork.named(spec, spec.fork.partition("@")[0])  # before any file is created below the root
    check_keys(spec)
    refuse(notification.lacking(spec))
    approval.check(spec)
    context = Context.created(root, spec.store, lock_timeout=spec.compute.lock_timeout)
    tracking_uri = spec.tracking.uri or local_uri(root)
    check_tracking(tracking_uri)
    context.store.check()
    spec = teachers.resolve(spec, context.store)
    starting_point = StartingPoint.resolve(spec, context.store)
    rehearse(spec, starting_point)
    budget = None
    if spec.budget.is_set:
        from flows.planning.budget import RunBudget
        from flows.planning.plan import plan

        budget = RunBudget(spec, plan(spec))
        budget.refuse_first()
    hush()
    stdout = sys.stdout
    with ExitStack() as stack:
        interruption = stack.enter_context(Interruption())
        for model in (spec.model, *spec.teachers(), *spec.judges()):
            check_weights(model, context.cache)
        _check_deployable(spec, context)
        stack.enter_context(redirect_stdout(sys.stderr))  # stdout is for the result only
        console = Console()
        log = root / "logs" / f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        stack.enter_context(logging_to(log, console))
        prefect_log = stack.enter_context(PrefectLog())
        console.line(f"{spec.name}, seed {spec.seed}; log: {log}")
        if (excess := spec.collect.excess_overlap(spec.rounds)) is not None:
            console.line(f"warning: {excess}")
        logger.info("overrides: %s", " ".join(overrides) or "none")
        if (forked := starting_point.fork) is not None:
            console.line(f"starts from the policy of run {forked.run.short} after step {forked.step}")
        stack.callback(context.warm.close)

        from flows.planning import preflight
        from flows.planning.cached_run import CachedRun
        from flows.reporting import console_lines, results

        cached = CachedRun.find(spec, context, starting_point)
        if cached is None:
            preflight.check(spec, context, starting_point)
        standalone = sweep is None and not server.inside_flow()  # a sweep and Prefect expect a new run
        earlier = cached.earlier() if cached is not None and standalone else None
        if cached is not None and earlier is not None:
            result = cached.repeat(earlier, console, log, start)
            console_lines.show(result, console, ui_command(tracking_uri), server.ui_command(root))
            print(result.to_json(), file=stdout, flush=True)
            return json.loads(result.to_json())
        prefect = None
        if cached is None or server.of_user():
            prefect = stack.enter_context(server.for_run(root, keep=sweep is not None))  # starts during the imports
            interruption.last_words.append(prefect.kill)
            stack.callback(prefect_log.stop)  # before the server stops

        services = "" if prefect is None else " and starting Prefect"
        console.line(f"loading packages{services}; the first stage also loads the model")
        from flows.execution import tracking
        from flows.execution.executor import Execution
        from flows.orchestration import prefect_artifacts, tasks
        from flows.orchestration.task_runners import TaskRunners
        from flows.release import registration
        from flows.reporting import report

        tracker = stack.enter_context(tracking.track(spec, overrides, sweep))
        interruption.last_words.append(lambda: tracker.finish("KILLED"))
        records = Records(root)
        dead = tracking.close_dead(records, tracker, spec.tracking.uri)
        record = stack.enter_context(
            recording(
                root,
                RunRecord(
                    tracker.run_id,
                    spec.name,
                    spec.seed,
                    time.time(),
                    spec=spec.model_dump(mode="json", by_alias=True),
                    overrides=overrides,
                    sweep=sweep,
                    git_commit=git_commit(CODE),
                    packages=package_versions(),
                    forked=starting_point.checkpoints,
                ),
            )
        )
        task_runners = TaskRunners()
        stack.callback(task_runners.close)
        execution = Execution(spec, context, console, tracker, log, record, task_runners.submit)
        stack.callback(execution.close)
        if execution.notifier is not None:
            stack.enter_context(execution.notifier.watching())
        logger.info("MLflow run %s", tracker.run_id)
        on_round = console_lines.round_teller(execution)
        deployment_errors: list[EspalierError] = []

        def body(call: StageRunner, beside: BackgroundRunner, at_once: ParallelRunner) -> results.Results:
            if budget is not None:

                def show(text: str) -> None:
                    prefect_artifacts.spent(text, spec.name)

                call = budget.guard(call, execution, lambda: outcome, show)
                at_once = budget.guard_branches(at_once, execution, lambda: outcome, show)
            recipe_run = Run(spec, call, beside, starting_point, on_round, execution.notice, prune, at_once=at_once)
            if spec.deploy.approve:
                recipe_run.approve = approval.asker(execution)
            outcome = recipe_run.outcome
            try:
                recipe_run.execute()
            except GuardTriggered as guard:
                report.log_stopped_report(execution, outcome, overrides, time.monotonic() - start, str(guard))
                raise
            released, error = registration.register(execution, outcome)
            if error is not None:
                deployment_errors.append(error)
            return results.conclude(execution, outcome, overrides, released, seconds=time.monotonic() - start)

        if prefect is None:
            result = body(execution.artifact, Sequential(execution.artifact), in_turn(execution.artifact))
        else:
            result = tasks.run_flow(
                spec.flow.title, execution, body, prefect, interruption, dead, records.close, prefect_log
            )
        line: dict[str, Any] = json.loads(result.to_json())
        record.run.result = line
        console_lines.show(result, console, tracker.ui_command, server.ui_command(root))
    print(result.to_json(), file=stdout, flush=True)
    if deployment_errors:
        raise deployment_errors[0]  # the trained policy is stored and registered, but not deployed
    return line


def _check_deployable(spec: ExperimentSpec, context: Context) -> None:
    """Raise ResourceError if the model cannot be exported in the requested formats or deployed to the target."""
    from components.models.weights import folder

    deploy, base = spec.deploy, folder(spec.model, context.cache)
    if deploy.mode == "none":
        return
    if "gguf" in deploy.formats and (base / "config.json").is_file():  # otherwise checked after the download
        from components.deployment.gguf import check_architecture

        check_architecture(base)
    if deploy.target is not None:
        deployment.check(spec)
