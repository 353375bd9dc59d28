"""Stages as Prefect tasks. Only references pass through Prefect; the artifact store alone says what is done.

A stage found by its key ends in the state Cached. Prefect's own caching and result storage are off: they would be a
second truth.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

from components.artifacts import Artifact
from flows.console import silence_prefect
from flows.execution import Execution
from flows.interrupt import Interruption
from flows.online_rl import Call
from flows.results import Results
from flows.server import Api, Server
from flows.stages import STAGES
from flows.stages.base import Request

logger = logging.getLogger(__name__)

RETRIES = 3
"""Of a request to the Prefect server: 14 s together. A server that is gone then is told nothing more."""
Found = TypeVar("Found")


def run_flow(
    name: str,
    execution: Execution,
    body: Callable[[Call], Results],
    api: Api,
    interruption: Interruption,
    dead: Sequence[str] = (),
) -> Results:
    """Runs `body` as a Prefect flow; what it calls become task runs. The result is summed up in a Prefect artifact.

    dead: ids of flow runs that were killed; they are set to Crashed. A server that goes away meanwhile costs a warning:
    the stages do not need it. Raises what `body` raises.
    """
    from prefect import flow
    from prefect.artifacts import create_markdown_artifact
    from prefect.context import FlowRunContext
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_CLIENT_MAX_RETRIES,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        temporary_settings,
    )

    silence_prefect()
    spec = execution.spec
    found: list[Results] = []
    failed: list[BaseException] = []

    @flow(name=name, flow_run_name=f"{spec.name} seed {spec.seed}", validate_parameters=False, persist_result=False)
    def prefect_flow(experiment: dict[str, Any]) -> None:
        interruption.install()
        context = FlowRunContext.get()
        if execution.record is not None and context is not None and context.flow_run is not None:
            execution.record.run.prefect_flow_run = str(context.flow_run.id)
        try:
            results = body(task_call(execution))
        except BaseException as error:  # Ctrl-C too: Prefect may raise another error in its place
            failed.append(error)
            raise
        found.append(results)
        create_markdown_artifact(results.markdown(), key="report", description=f"Results of {spec.name}")

    settings: dict[Any, Any] = {PREFECT_API_URL: api.url(), PREFECT_CLIENT_MAX_RETRIES: RETRIES}
    if isinstance(api, Server):  # nobody watches for heartbeats there, and their thread takes a second to stop
        settings[PREFECT_FLOWS_HEARTBEAT_FREQUENCY] = None
    with temporary_settings(settings):
        try:
            _close(dead)
            prefect_flow(spec.model_dump(mode="json", by_alias=True))
        except BaseException as error:
            if failed:  # whatever Prefect made of it
                raise failed[0] from None
            if not found or not isinstance(error, Exception):
                raise
            logger.warning("the run is done, but the Prefect server was not told all of it: %s", error)
        finally:
            _send_events()
    return found[0]


def task_call(execution: Execution) -> Call:
    """Runs stages as tasks of the flow that is active."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE
    from prefect.states import Completed

    def stage(label: str, step: int, request: dict[str, Any]) -> Any:
        done = execution.stage(label, step, Request.from_json(request))
        if done.status == "cached":
            return Completed(name="Cached", message=f"found by its key {done.artifact.key[:12]}", data=done.reference())
        return done.reference()

    tasks = {name: task(stage, name=name, cache_policy=NO_CACHE, persist_result=False) for name in STAGES}

    def call(label: str, step: int, request: Request) -> Artifact:
        tasks[request.stage].with_options(task_run_name=label)(label, step, request.to_json())
        return execution.done[label].artifact

    return call


def _close(flow_runs: Sequence[str]) -> None:
    """Nobody else does: a killed flow and its task stay Running for Prefect."""
    if not flow_runs:
        return
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.states import Crashed

    killed = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(one) for one in flow_runs]))
    crashed = Crashed(message="its process was killed")
    with get_client(sync_client=True) as client:
        for task_run in client.read_task_runs(flow_run_filter=killed):
            if task_run.state is None or not task_run.state.is_final():
                client.set_task_run_state(task_run.id, crashed, force=True)
        for flow_run in client.read_flow_runs(flow_run_filter=killed):
            if flow_run.state is None or not flow_run.state.is_final():
                client.set_flow_run_state(flow_run.id, crashed, force=True)


def _send_events() -> None:
    """States of tasks are sent by a thread; the server must hear the last ones before it is stopped."""
    from prefect.events.worker import EventsWorker

    EventsWorker.drain_all(timeout=3)
