"""Flow that jobs on clusters see as theirs. The flow of a run is a closure, which cannot be sent to other machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import flow
from prefect.context import FlowRunContext, TaskRunContext


@flow(name="stages on a cluster")
def stages_on_cluster() -> None:
    """Do nothing."""


@contextmanager
def sendable_context() -> Iterator[None]:
    """Provide the context of the active flow run with this flow in place of its own, and without parameters or the
    current task run."""
    active = FlowRunContext.get()
    assert active is not None
    token = TaskRunContext.__var__.set(None)
    try:
        with active.model_copy(update={"flow": stages_on_cluster, "parameters": {}}):
            yield
    finally:
        TaskRunContext.__var__.reset(token)
