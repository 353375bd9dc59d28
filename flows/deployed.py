"""The flow behind every deployment: an experiment by its name, and overrides, as on the command line.

`flows.serve` registers it; a process of Prefect (`flows.serve`'s own, or a worker's) imports and runs it, with the
stages as its tasks. What it composes, checks and refuses is what `flows.run` does, so that equal words have equal
stage keys. A mistake ends the run as Failed with the command's message, and no stack trace.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import flow
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, FailedRun
from prefect.states import Cancelled, Completed, Failed, State

from components.errors import EspalierError
from flows.endings import told
from flows.parameters import resolve

FLOW = "online-rl"
"""Its name in Prefect, which runs of the command line have too."""


@flow(name=FLOW, persist_result=False)
def experiment(experiment: str, overrides: list[str] = [], config_dir: str | None = None) -> Any:  # noqa: B006  Prefect's form shows an empty list
    """Runs an experiment, as `python -m flows.run +experiment=EXPERIMENT OVERRIDES` does.

    experiment: a file of conf/experiment. overrides: such as `rounds=2` or `algorithm.learning_rate=1e-5`, one a line.
    config_dir: a folder of your own config groups, on the machine where the run takes place.
    """
    context = FlowRunContext.get()
    assert context is not None, "Prefect calls this"
    assert context.flow_run is not None
    for name in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_no_trace)
    try:
        _forget_secrets(context, {"experiment": experiment, "overrides": overrides, "config_dir": config_dir})
        spec = resolve(experiment, overrides, config_dir)
        from flows.keys import check_keys
        from flows.online_rl import run

        check_keys(spec)
        with _heard(str(context.flow_run.id)):
            result = run(spec, overrides=[f"+experiment={experiment}", *overrides])
        success = result["success"]
        return Completed(message="nothing was measured" if success is None else f"held-out success {success:.3f}")
    except KeyboardInterrupt:
        if not _cancelled(context):
            raise  # the machine goes, or the worker is stopped: Prefect calls it a crash
        return Cancelled(message="what was finished is kept; a run with the same parameters goes on from there")
    except (EspalierError, OSError) as error:
        if (found := told(error)) is None:
            raise
        return _failed(found[0])


def _forget_secrets(context: FlowRunContext, parameters: dict[str, Any]) -> None:
    """Masks the parameters that Prefect has stored of this run, where somebody started it with a secret. The run is
    refused afterwards."""
    from prefect import get_client

    from flows.overrides import mask_overrides, parsed_secrets

    if not parsed_secrets(parameters["overrides"]):
        return
    assert context.flow_run is not None
    masked = {**parameters, "overrides": mask_overrides(parameters["overrides"])}
    with get_client(sync_client=True) as client:
        client.update_flow_run(context.flow_run.id, parameters=masked)


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
        return record.name == "flows.console" or record.levelno >= logging.WARNING


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
