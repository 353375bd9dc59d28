"""Stages as Prefect tasks. Only references pass through Prefect; the artifact store alone says what is done.

A stage found by its key ends in the state Cached. Prefect's own caching and result storage are off: they would be a
second truth.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from components.artifacts import Artifact
from components.errors import EngineError, EnvironmentFailed, EspalierError, ResourceError
from components.redaction import mask
from flows.execution.executor import Done, Execution
from flows.execution.overlap import Beside, together
from flows.experiment.requests import Call
from flows.history.records import RunRecord
from flows.orchestration import prefect_artifacts
from flows.orchestration.server import Api, Server
from flows.reporting.results import Results
from flows.stages import STAGES
from flows.stages.base import Request
from flows.terminal.console import silence_prefect
from flows.terminal.interrupt import Interruption

if TYPE_CHECKING:
    from prefect import State, Task
    from prefect.client.schemas.objects import TaskRun

logger = logging.getLogger(__name__)

RETRIES = 3
"""Of a request to a Prefect server that answers now and then: 14 s together. One that has ended is asked once."""
Found = TypeVar("Found")


def run_flow(
    name: str,
    execution: Execution,
    body: Callable[[Call, Beside], Results],
    api: Api,
    interruption: Interruption,
    dead: Sequence[RunRecord] = (),
    close: Callable[[RunRecord], None] = lambda run: None,
) -> Results:
    """Runs `body` as a Prefect flow; what it calls become task runs, also what it calls beside another. Inside of a
    flow that Prefect runs already (`flows.scheduling.served_flow`) they become tasks of that one.

    dead: runs that were killed; their flow runs are set to Crashed, and `close` is called with each that Prefect was
    told of. A server that goes away meanwhile costs a warning: the stages do not need it. Raises what `body` raises,
    and ResourceError where the server refuses the run before that.
    """
    import httpx
    from prefect import flow
    from prefect.context import FlowRunContext
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import temporary_settings
    from prefect.states import Completed

    silence_prefect()
    spec = execution.spec
    found: list[Results] = []
    failed: list[BaseException] = []
    served = FlowRunContext.get() is not None
    give_up = ExitStack()

    def server_ended() -> bool:
        """Look whether the server has ended; if so, what Prefect still sends from this context is not tried again."""
        if not api.ended():
            return False
        give_up.enter_context(temporary_settings({"client.max_retries": 0}))
        return True

    def inside() -> Results:
        interruption.install()
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        if execution.record is not None:
            execution.record.begun(str(context.flow_run.id))
        try:
            if execution.tracker is not None:
                prefect_artifacts.mlflow_link(execution.tracker, spec.name)
            wrap = functools.partial(as_tasks, retries=spec.compute.retries, delay=spec.compute.retry_delay)
            results = body(wrap(execution.stage), together(execution, wrap))
        except BaseException as error:  # Ctrl-C too: Prefect may raise another error in its place
            failed.append(error)
            server_ended()
            raise
        found.append(results)
        if not server_ended():
            prefect_artifacts.results(results, spec.name)
        return results

    @flow(name=name, flow_run_name=f"{spec.name} seed {spec.seed}", validate_parameters=False, persist_result=False)
    def prefect_flow(experiment: dict[str, Any]) -> Any:
        results = inside()
        return Completed(name="Pruned", message=results.pruned) if results.pruned else None

    settings = {**api.settings(), "client.max_retries": RETRIES}
    if isinstance(api, Server):  # nobody watches for heartbeats there, and their thread takes a second to stop
        settings["flows.heartbeat_frequency"] = None
    with temporary_settings(settings), prefect_artifacts.progress(execution), give_up:
        try:
            _close(dead, close)
            if served:
                inside()
            else:
                prefect_flow(mask(spec.model_dump(mode="json", by_alias=True)))
        except BaseException as error:
            if failed:  # whatever Prefect made of it
                raise failed[0] from None
            if not found and isinstance(error, httpx.HTTPError | PrefectHTTPStatusError):
                raise ResourceError(f"the Prefect server at {api.url()} refuses the run: {error}{api.advice}") from None
            if not found or not isinstance(error, Exception):
                raise
            reason = "the Prefect server has ended" if api.ended() else error
            logger.warning("the run is done, but the Prefect server was not told all of it: %s", reason)
        finally:
            if not served and not api.ended():  # Prefect's own process sees to that
                _send_events()
    return found[0]


def passing(error: Any) -> bool:
    """Whether another try may end better: a process that died without a word, an engine, an environment."""
    return type(error) is EspalierError or isinstance(error, EngineError | EnvironmentFailed)


def as_tasks(run: Callable[[str, int, Request], Done], *, retries: int = 0, delay: float = 0.0) -> Call:
    """Runs stages, by the function that does, as tasks of the flow that is active. retries: further tries of a stage
    after an error that may pass, so many seconds after it; it goes on from what it had finished."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE
    from prefect.states import Completed

    made: dict[str, Artifact] = {}

    def stage(label: str, step: int, request: dict[str, Any]) -> Any:
        done = run(label, step, Request.from_json(request))
        made[label] = done.artifact
        if done.status == "cached":
            return Completed(name="Cached", message=f"found by its key {done.artifact.key[:12]}", data=done.reference())
        return done.reference()

    def again(task: Task, task_run: TaskRun, state: State) -> bool:
        return passing(state.data)

    tries: dict[str, Any] = {"retries": retries, "retry_delay_seconds": delay, "retry_condition_fn": again}
    tasks = {name: task(stage, name=name, cache_policy=NO_CACHE, persist_result=False, **tries) for name in STAGES}

    def call(label: str, step: int, request: Request) -> Artifact:
        tasks[request.stage].with_options(task_run_name=label)(label, step, request.to_json())
        return made[label]

    return call


def _close(dead: Sequence[RunRecord], close: Callable[[RunRecord], None]) -> None:
    """Tells Prefect which runs were killed; `close` is called with each that it was told of. A server that fails costs
    a warning: the runs that are left stay as they are, and the next run tries again."""
    for place, run in enumerate(dead):
        try:
            _crash(run.prefect_flow_run)
        except Exception as error:  # noqa: BLE001  a server has many ways to fail, and the run needs none of it
            left = ", ".join(f"{one.prefect_flow_run} (run {one.short})" for one in dead[place:])
            logger.warning(
                "Prefect could not be told that these flow runs were killed, they stay Running there until the next "
                "run tries again: %s. %s: %s",
                *(left, type(error).__name__, error),
            )
            return
        close(run)


def _crash(flow_run_id: str) -> None:
    """Nobody else does: a killed flow and its task stay Running for Prefect."""
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
    from prefect.client.schemas.objects import TERMINAL_STATES, StateType
    from prefect.states import Crashed

    killed = FlowRunFilter.model_validate({"id": {"any_": [flow_run_id]}})
    open_ = [one for one in StateType if one not in TERMINAL_STATES]  # the server gives 200 tasks at most
    at_work = TaskRunFilter.model_validate({"state": {"type": {"any_": open_}}})
    crashed = Crashed(message="its process was killed")
    with get_client(sync_client=True) as client:
        for task_run in client.read_task_runs(flow_run_filter=killed, task_run_filter=at_work):
            client.set_task_run_state(task_run.id, crashed, force=True)
        for flow_run in client.read_flow_runs(flow_run_filter=killed):
            if flow_run.state is None or not flow_run.state.is_final():
                client.set_flow_run_state(flow_run.id, crashed, force=True)


def _send_events() -> None:
    """States of tasks are sent by a thread; the server must hear the last ones before it is stopped."""
    from prefect.events.worker import EventsWorker

    EventsWorker.drain_all(timeout=3)
