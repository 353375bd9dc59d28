"""Artifacts of a run in Prefect's UI: progress, report, table of results, link to MLflow.

A stage that takes longer than `PATIENCE` gets a progress artifact on its task run. A run gets a Markdown report, a
table of its results, and a link to its MLflow run if MLflow is a server. Artifacts with a key, which the page Artifacts
lists with their history, are named after the experiment.

A separate thread sends progress, so stages never wait for the server. If the server is unreachable, only the progress
is lost.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

from flows.reporting.results import Results
from flows.stages.base import Progress

if TYPE_CHECKING:
    from components.tracking.mlflow_tracker import Tracker
    from flows.execution.executor import Execution

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds before a stage gets a progress artifact, and between two updates."""


def key(kind: str, name: str) -> str:
    """Return the key of an artifact, with the characters that Prefect allows: lower-case letters, digits and dashes."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"


def results(run_results: Results, name: str) -> None:
    """Create the report and the tables of results in the current flow run. name: that of the experiment."""
    from prefect.artifacts import create_markdown_artifact, create_table_artifact

    create_markdown_artifact(run_results.markdown(), key=key("report", name), description=f"Results of {name}")
    for table in run_results.tables():
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        description = f"{table.title[:1].upper()}{table.title[1:]}"
        create_table_artifact(rows, key=key(table.key, name), description=description)


def spent(text: str, name: str) -> None:
    """Create or replace the artifact with the spent share of the budget. A failure of the server is ignored."""
    from prefect.artifacts import create_markdown_artifact
    from prefect.context import FlowRunContext

    if FlowRunContext.get() is None:
        return
    try:
        create_markdown_artifact(text, key=key("budget", name), description=f"Budget of {name}")
    except Exception as error:  # noqa: BLE001  the run does not depend on the artifact
        logger.warning("cannot create the artifact of the budget in Prefect: %s", error)


def mlflow_link(tracker: Tracker, name: str) -> None:
    """Create a link to the MLflow run if MLflow is a server."""
    from prefect.artifacts import create_link_artifact

    if (url := tracker.url) is None:
        return
    try:
        create_link_artifact(url, link_text=f"MLflow run {tracker.run_id}", key=key("mlflow", name))
    except Exception as error:  # noqa: BLE001  the run does not depend on the link
        logger.warning("cannot create the link to the MLflow run in Prefect: %s", error)


@contextmanager
def progress(execution: Execution) -> Iterator[None]:
    """Report the progress of an execution's stages to Prefect inside the block."""
    bars = _Bars()
    execution.watchers.append(bars.stage)
    try:
        yield
    finally:
        execution.watchers.remove(bars.stage)
        bars.close()


class _Bar:
    """Progress artifact of one stage, created with the first update."""

    def __init__(self, bars: _Bars, label: str, unit: str):
        from prefect.context import TaskRunContext

        task = TaskRunContext.get()
        self.flow_run_id = task.task_run.flow_run_id if task else None
        self.task_run_id = task.task_run.id if task else None
        self.artifact: UUID | None = None
        """Id of the artifact; only the sending thread accesses it."""
        self._bars = bars
        self._label, self._unit = label, unit
        self._last_update = time.monotonic()
        self._state = (0, 0)
        self._visible = False

    def __call__(self, done: int, total: int, values: Mapping[str, float] | None = None) -> None:
        self._state = (done, total)
        if total and time.monotonic() - self._last_update >= PATIENCE:
            self._last_update = time.monotonic()
            self._update()

    def close(self) -> None:
        """Send the final state of the stage if it has a progress artifact."""
        if self._visible:
            self._update()

    def _update(self) -> None:
        self._visible = True
        done, total = self._state
        text = f"{self._label}: {done} of {total} {self._unit}"
        self._bars.send(self, min(100.0, 100.0 * done / total), text)


class _Bars:
    """Progress artifacts of one run, and the thread that sends them to Prefect."""

    def __init__(self) -> None:
        self._updates: queue.SimpleQueue[tuple[_Bar, float, str] | None] = queue.SimpleQueue()
        self._context = contextvars.copy_context()  # Prefect's settings
        self._thread: threading.Thread | None = None

    @contextmanager
    def stage(self, label: str, unit: str) -> Iterator[Progress]:
        """Report the progress of one stage. Entered by the task that runs it; any thread may call the result."""
        bar = _Bar(self, label, unit)
        try:
            yield bar
        finally:
            bar.close()

    def send(self, bar: _Bar, share: float, text: str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._context.run, args=(self._send,), name="progress", daemon=True)
            self._thread.start()
        self._updates.put((bar, share, text))

    def close(self) -> None:
        """Wait up to `PATIENCE` seconds until pending updates are sent."""
        if self._thread is not None:
            self._updates.put(None)
            self._thread.join(PATIENCE)

    def _send(self) -> None:
        from prefect import get_client
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        with get_client(sync_client=True) as client:
            while (item := self._updates.get()) is not None:
                bar, share, text = item
                try:
                    if bar.artifact is not None:
                        client.update_artifact(bar.artifact, ArtifactUpdate(data=share, description=text))
                    else:
                        request = ArtifactCreate(
                            type="progress",
                            data=share,
                            description=text,
                            flow_run_id=bar.flow_run_id,
                            task_run_id=bar.task_run_id,
                        )
                        bar.artifact = client.create_artifact(request).id
                except Exception as error:  # noqa: BLE001  any failure of the server only loses progress
                    logger.debug("cannot send the progress %s to Prefect: %s", text, error)
