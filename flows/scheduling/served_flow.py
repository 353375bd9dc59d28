"""Prefect flow of every deployment: the operator's experiment with the overrides of the user who starts the run.

`flow_of` names it after the recipe of the experiment, as in runs from the command line.

`flows.serve` registers the flow. A Prefect process (of `flows.serve` or of a worker) imports and runs it, with the
stages as tasks. Experiment, config folder and the operator's overrides come from the environment of that process
(`flows.scheduling.parameters`); Prefect only stores the parameters that a run may change. The configuration is composed
as in `flows.run`, so the same overrides give the same stage keys. A user error ends the run in the state Failed with
the command's message and without a stack trace.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from prefect import Flow, flow
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, FailedRun
from prefect.states import Cancelled, Completed, Failed, State

from components.errors import EspalierError, ResourceError
from flows.execution import prefect_credential
from flows.orchestration.prefect_log import PrefectLog
from flows.scheduling.parameters import from_environment, resolve
from flows.terminal.console import printable, shorten, silence_prefect
from flows.terminal.exit_codes import describe_error
from flows.terminal.overrides import mask_overrides

logger = logging.getLogger(__name__)

LONGEST_NAME = 200
"""Maximum number of characters in the name of a flow run."""
_GENERATED = re.compile("[a-z]+-[a-z]+")
"""Names that Prefect generates, such as `quick-otter`."""


@flow(persist_result=False)
def experiment(overrides: list[str] = []) -> Any:  # noqa: B006  Prefect's form shows an empty list
    """Run the experiment of this deployment with your overrides.

    overrides: overrides such as `rounds=2`, one per line; the deployment's description lists the allowed keys.
    """
    context = FlowRunContext.get()
    assert context is not None, "only Prefect calls this function"
    assert context.flow_run is not None
    for name in prefect_credential.VARIABLES:  # Prefect's settings have it; child processes must not inherit it
        os.environ.pop(name, None)
    silence_prefect()
    for name in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_hide_stack_trace)
    try:
        _forget_secrets(context, overrides)
        deployment = from_environment(_deployment_name(context))
        _name_run(context, deployment.name, overrides)
        spec = resolve(deployment, overrides)
        from flows.experiment.prerequisites import check_keys
        from flows.history.records import headline
        from flows.session import run

        check_keys(spec)
        result = run(spec, overrides=[*deployment.lines, *overrides])
        return Completed(message=headline(result) or "no evaluation")
    except KeyboardInterrupt:
        if not _cancelled(context):
            raise  # preempted machine or stopped worker: Prefect reports a crash
        return Cancelled(message="finished work is saved; a run with the same parameters resumes from there")
    except (EspalierError, OSError) as error:
        if (message_and_code := describe_error(error)) is None:
            raise
        return _failed(context, message_and_code[0])


def flow_of(recipe: str) -> Flow[..., Any]:
    """Return the flow under the name of a recipe, such as `agent-evol`."""
    return experiment.with_options(name=recipe)


def _forget_secrets(context: FlowRunContext, overrides: list[str]) -> None:
    """Mask this run's parameters in Prefect if they contain a secret. The run is rejected afterwards."""
    from prefect import get_client

    from flows.terminal.overrides import parsed_secrets

    if not parsed_secrets(overrides):
        return
    assert context.flow_run is not None
    with get_client(sync_client=True) as client:
        client.update_flow_run(context.flow_run.id, parameters={"overrides": mask_overrides(overrides)})


def _deployment_name(context: FlowRunContext) -> str:
    """Return the name of this run's deployment. Raises ResourceError if it has none."""
    from prefect import get_client

    assert context.flow_run is not None
    if context.flow_run.deployment_id is None:
        raise ResourceError("this flow run has no deployment; start runs from a deployment of flows.serve")
    with get_client(sync_client=True) as client:
        return client.read_deployment(context.flow_run.deployment_id).name


def _name_run(context: FlowRunContext, deployment: str, overrides: list[str]) -> None:
    """Name the flow run after its deployment and its overrides, unless the user has named it."""
    from prefect import get_client

    assert context.flow_run is not None
    if not _GENERATED.fullmatch(context.flow_run.name):
        return
    name = printable(": ".join(filter(None, (deployment, ", ".join(mask_overrides(overrides))))))
    with get_client(sync_client=True) as client:
        client.update_flow_run(context.flow_run.id, name=shorten(name, LONGEST_NAME))


def _failed(context: FlowRunContext, message: str) -> State:
    """Return the state Failed with a message that the run's log shows, too."""
    assert context.flow_run is not None
    with PrefectLog() as log:
        log.connect(str(context.flow_run.id))
        logger.error(message)
    return Failed(message=message)


def _hide_stack_trace(record: logging.LogRecord) -> bool:
    """Filter out the stack traces that Prefect logs for runs that end as Failed or Cancelled."""
    return record.exc_info is None or not isinstance(record.exc_info[1], FailedRun | CancelledRun)


def _cancelled(context: FlowRunContext) -> bool:
    """Return True if the run was cancelled in Prefect."""
    from prefect import get_client

    assert context.flow_run is not None
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(context.flow_run.id).state
    return state is not None and (state.is_cancelling() or state.is_cancelled())
