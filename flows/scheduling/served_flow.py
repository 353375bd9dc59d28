"""The flow behind every deployment: what the operator serves, with the overrides of whoever starts the run.

`flows.serve` registers it; a process of Prefect (`flows.serve`'s own, or a worker's) imports and runs it, with the
stages as its tasks. Experiment, config folder and the operator's overrides come from the environment of that process
(`flows.scheduling.parameters`); Prefect stores only what a run may change. What is composed is what `flows.run`
composes, so that equal words have equal stage keys. A mistake ends the run as Failed with the command's message, and no
stack trace.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import flow
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, FailedRun
from prefect.states import Cancelled, Completed, Failed, State

from components.errors import EspalierError, ResourceError
from flows.execution import prefect_credential
from flows.scheduling.parameters import from_environment, resolve
from flows.terminal.exit_codes import describe_error

FLOW = "online-rl"
"""Its name in Prefect, which runs of the command line have too."""


@flow(name=FLOW, persist_result=False)
def experiment(overrides: list[str] = []) -> Any:  # noqa: B006  Prefect's form shows an empty list
    """Runs the experiment of this deployment, with overrides of your own.

    overrides: such as `rounds=2`, one a line; the deployment's description says which keys may be set.
    """
    context = FlowRunContext.get()
    assert context is not None, "Prefect calls this"
    assert context.flow_run is not None
    for name in prefect_credential.VARIABLES:  # Prefect's settings hold it; stages and their servers inherit none
        os.environ.pop(name, None)
    for name in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_no_trace)
    try:
        _forget_secrets(context, overrides)
        deployment = from_environment(_deployment_name(context))
        spec = resolve(deployment, overrides)
        from flows.experiment.prerequisites import check_keys
        from flows.session import run

        check_keys(spec)
        with _heard(str(context.flow_run.id)):
            result = run(spec, overrides=[*deployment.lines, *overrides])
        success = result["success"]
        return Completed(message="nothing was measured" if success is None else f"held-out success {success:.3f}")
    except KeyboardInterrupt:
        if not _cancelled(context):
            raise  # the machine goes, or the worker is stopped: Prefect calls it a crash
        return Cancelled(message="what was finished is kept; a run with the same parameters goes on from there")
    except (EspalierError, OSError) as error:
        if (found := describe_error(error)) is None:
            raise
        return _failed(found[0])


def _forget_secrets(context: FlowRunContext, overrides: list[str]) -> None:
    """Mask the parameters that Prefect has stored of this run, where somebody started it with a secret. The run is
    refused afterwards."""
    from prefect import get_client

    from flows.terminal.overrides import mask_overrides, parsed_secrets

    if not parsed_secrets(overrides):
        return
    assert context.flow_run is not None
    with get_client(sync_client=True) as client:
        client.update_flow_run(context.flow_run.id, parameters={"overrides": mask_overrides(overrides)})


def _deployment_name(context: FlowRunContext) -> str:
    """Return the name of the deployment whose run this is. Raises ResourceError where it belongs to none."""
    from prefect import get_client

    assert context.flow_run is not None
    if context.flow_run.deployment_id is None:
        raise ResourceError("this flow run belongs to no deployment; runs are started from one of flows.serve")
    with get_client(sync_client=True) as client:
        return client.read_deployment(context.flow_run.deployment_id).name


def _failed(message: str) -> State:
    from prefect.logging import get_run_logger

    get_run_logger().error(message)
    return Failed(message=message)


def _no_trace(record: logging.LogRecord) -> bool:
    """Prefect shows a stack trace for a run that ends as Failed or Cancelled, of its own functions."""
    return record.exc_info is None or not isinstance(record.exc_info[1], FailedRun | CancelledRun)


def _cancelled(context: FlowRunContext) -> bool:
    """Whether somebody cancelled the run in Prefect."""
    from prefect import get_client

    assert context.flow_run is not None
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(context.flow_run.id).state
    return state is not None and (state.is_cancelling() or state.is_cancelled())


class _OfRun(logging.Filter):
    """Lets pass what people are told, and says which run it belongs to."""

    def __init__(self, flow_run_id: str):
        super().__init__()
        self._flow_run_id = flow_run_id

    def filter(self, record: logging.LogRecord) -> bool:
        record.flow_run_id = self._flow_run_id
        return record.name == "flows.terminal.console" or record.levelno >= logging.WARNING


@contextmanager
def _heard(flow_run_id: str) -> Iterator[None]:
    """What a run says goes to Prefect too, whose UI shows it. The run takes the root logger for itself."""
    from prefect.logging.handlers import APILogHandler

    handler = APILogHandler(logging.INFO)
    handler.addFilter(_OfRun(flow_run_id))
    loggers = [logging.getLogger(name) for name in ("flows", "components")]
    for one in loggers:
        one.addHandler(handler)
    try:
        yield
    finally:
        for one in loggers:
            one.removeHandler(handler)
