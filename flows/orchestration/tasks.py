"""Stages as Prefect tasks. Only references to artifacts pass through Prefect.

The artifact store alone decides what is cached; Prefect's own caching and result storage are off. A cached stage ends
in the state Cached.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from components.artifacts import Artifact
from components.errors import ResourceError
from components.redaction import mask
from flows.execution.executor import Execution, FinishedStage
from flows.execution.overlap import BackgroundRunner, Concurrent
from flows.execution.parallel import ParallelRunner, at_once
from flows.execution.sharding import is_transient
from flows.history.records import RunRecord
from flows.orchestration import prefect_artifacts
from flows.orchestration.prefect_log import PrefectLog
from flows.orchestration.server import Api, PrefectServer
from flows.reporting.results import Results
from flows.stages import STAGES
from flows.stages.base import Request, StageRunner
from flows.terminal.console import silence_prefect
from flows.terminal.interrupt import Interruption

if TYPE_CHECKING:
    from prefect import State, Task
    from prefect.client.schemas.objects import TaskRun

logger = logging.getLogger(__name__)

RETRIES = 3
"""Retries of a request to an unreliable Prefect server, 14 s in total. A server that has stopped gets no retries."""


def run_flow(
    name: str,
    execution: Execution,
    body: Callable[[StageRunner, BackgroundRunner, ParallelRunner], Results],
    api: Api,
    interruption: Interruption,
    dead: Sequence[RunRecord] = (),
    close: Callable[[RunRecord], None] = lambda run: None,
    log: PrefectLog | None = None,
) -> Results:
    """Run `body` as a Prefect flow, with its stages as task runs, those that overlap included.

    Inside a flow run of Prefect (`flows.scheduling.served_flow`) the stages become tasks of that flow run.

    dead: killed runs; their flow runs are set to Crashed. close: called with each dead run that Prefect has accepted.
    log: handler that sends console lines and warnings to the flow run. A server that stops during the run only causes a
    warning, because stages do not need it. Raises errors of `body`, and ResourceError if the server rejects the run
    before that.
    """
    import httpx
    from prefect import flow
    from prefect.context import FlowRunContext
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import temporary_settings
    from prefect.states import Completed

    silence_prefect()
    spec = execution.spec
    completed: list[Results] = []
    failed: list[BaseException] = []
    served = FlowRunContext.get() is not None
    give_up = ExitStack()

    def server_ended() -> bool:
        """Return True if the server has stopped; Prefect's further requests from this context are then not retried."""
        if not api.ended():
            return False
        give_up.enter_context(temporary_settings({"client.max_retries": 0}))
        return True

    def inside() -> Results:
        interruption.install()
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        if log is not None:
            log.connect(str(context.flow_run.id))
        if execution.record is not None:
            execution.record.begun(str(context.flow_run.id))
        try:
            if execution.tracker is not None:
                prefect_artifacts.mlflow_link(execution.tracker, spec.name)
            wrap = functools.partial(as_tasks, retries=spec.compute.retries, delay=spec.compute.retry_delay)
            results = body(wrap(execution.stage), Concurrent(execution, wrap), at_once(execution, wrap))
        except BaseException as error:  # Ctrl-C too: Prefect may raise another error in its place
            failed.append(error)
            server_ended()
            raise
        completed.append(results)
        if not server_ended():
            prefect_artifacts.results(results, spec.name)
        return results

    @flow(name=name, flow_run_name=f"{spec.name} seed {spec.seed}", validate_parameters=False, persist_result=False)
    def prefect_flow(experiment: dict[str, Any]) -> Any:
        results = inside()
        return Completed(name="Pruned", message=results.pruned) if results.pruned else None

    settings = {**api.settings(), "client.max_retries": RETRIES}
    if isinstance(api, PrefectServer):  # nothing monitors heartbeats there, and their thread takes a second to stop
        settings["flows.heartbeat_frequency"] = None
    with temporary_settings(settings), prefect_artifacts.progress(execution), give_up:
        try:
            _close(dead, close)
            if served:
                inside()
            else:
                prefect_flow(mask(spec.model_dump(mode="json", by_alias=True)))
        except BaseException as error:
            if failed:  # Prefect may have replaced the original error
                raise failed[0] from None
            if not completed and isinstance(error, httpx.HTTPError | PrefectHTTPStatusError):
                raise ResourceError(f"the Prefect server at {api.url()} rejects the run: {error}{api.advice}") from None
            if not completed or not isinstance(error, Exception):
                raise
            reason = "the Prefect server has stopped" if api.ended() else error
            logger.warning("the run is finished, but the Prefect server did not get all of its states: %s", reason)
        finally:
            if not served and not api.ended():  # in a served flow Prefect's own process sends them
                _send_events()
    return completed[0]


def as_tasks(run: Callable[[str, int, Request], FinishedStage], *, retries: int = 0, delay: float = 0.0) -> StageRunner:
    """Return a function that runs stages as tasks of the current flow run.

    run: function that runs a stage. retries: retries of a stage after a transient error; a retry resumes finished work.
    delay: seconds before a retry.
    """
    from prefect import task
    from prefect.cache_policies import NO_CACHE
    from prefect.states import Completed

    artifacts: dict[str, Artifact] = {}

    def stage(label: str, step: int, request: dict[str, Any]) -> Any:
        done = run(label, step, Request.from_json(request))
        artifacts[label] = done.artifact
        if done.status == "cached":
            return Completed(name="Cached", message=f"cached as {done.artifact.key[:12]}", data=done.reference())
        return done.reference()

    def should_retry(task: Task, task_run: TaskRun, state: State) -> bool:
        return is_transient(state.data)

    options: dict[str, Any] = {"retries": retries, "retry_delay_seconds": delay, "retry_condition_fn": should_retry}
    tasks = {name: task(stage, name=name, cache_policy=NO_CACHE, persist_result=False, **options) for name in STAGES}

    def call(label: str, step: int, request: Request) -> Artifact:
        tasks[request.stage].with_options(task_run_name=label)(label, step, request.to_json())
        return artifacts[label]

    return call


def _close(dead: Sequence[RunRecord], close: Callable[[RunRecord], None]) -> None:
    """Set killed runs to Crashed in Prefect and call `close` with each. If the server fails, log a warning and stop;
    the next run retries the remaining ones."""
    for index, run in enumerate(dead):
        try:
            _crash(run.prefect_flow_run)
        except Exception as error:  # noqa: BLE001  no failure of the server may fail the run
            remaining = ", ".join(f"{killed.prefect_flow_run} (run {killed.short})" for killed in dead[index:])
            logger.warning(
                "cannot set these killed flow runs to Crashed in Prefect; they stay Running until the next run "
                "retries: %s. %s: %s",
                *(remaining, type(error).__name__, error),
            )
            return
        close(run)


def _crash(flow_run_id: str) -> None:
    """Set a killed flow run and its tasks to Crashed; Prefect itself leaves them Running."""
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
    from prefect.client.schemas.objects import TERMINAL_STATES, StateType
    from prefect.states import Crashed

    killed = FlowRunFilter.model_validate({"id": {"any_": [flow_run_id]}})
    open_states = [state for state in StateType if state not in TERMINAL_STATES]  # the server returns at most 200 tasks
    unfinished = TaskRunFilter.model_validate({"state": {"type": {"any_": open_states}}})
    crashed = Crashed(message="its process was killed")
    with get_client(sync_client=True) as client:
        for task_run in client.read_task_runs(flow_run_filter=killed, task_run_filter=unfinished):
            client.set_task_run_state(task_run.id, crashed, force=True)
        for flow_run in client.read_flow_runs(flow_run_filter=killed):
            if flow_run.state is None or not flow_run.state.is_final():
                client.set_flow_run_state(flow_run.id, crashed, force=True)


def _send_events() -> None:
    """Wait until Prefect's thread has sent the last task states, before the server stops."""
    from prefect.events.worker import EventsWorker

    EventsWorker.drain_all(timeout=3)
