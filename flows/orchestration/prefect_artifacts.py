"""What Prefect's UI shows of a run besides the states of its stages: artifacts.

A stage that takes longer than `PATIENCE` gets a progress artifact, which hangs on its task run. A run leaves a report
in Markdown and a table of its results, and a link to its MLflow run where MLflow is a server. Artifacts with a key,
which the page Artifacts lists with their history, are named after the experiment.

Progress is sent by a thread of its own: neither a stage nor its end waits for the server, and one that is away costs
nothing but the progress.
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
"""Seconds before a stage is worth a progress bar, and between two words about it."""


def key(kind: str, name: str) -> str:
    """Key of an artifact: lower-case letters, digits and dashes, all that Prefect allows."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"


def results(found: Results, name: str) -> None:
    """The report and the table of a run, of the flow that is active."""
    from prefect.artifacts import create_markdown_artifact, create_table_artifact

    create_markdown_artifact(found.markdown(), key=key("report", name), description=f"Results of {name}")
    columns = ("policy", "success", "reward", "turns")
    table = [dict(zip(columns, row, strict=True)) for row in found.rows()]
    create_table_artifact(table, key=key("results", name), description="Held-out episodes, mean [95 % interval]")


def mlflow_link(tracker: Tracker, name: str) -> None:
    """A link to the MLflow run, where that is on a server."""
    from prefect.artifacts import create_link_artifact

    if (url := tracker.url) is None:
        return
    try:
        create_link_artifact(url, link_text=f"MLflow run {tracker.run_id}", key=key("mlflow", name))
    except Exception as error:  # noqa: BLE001  the run needs no link
        logger.warning("Prefect was not told of the MLflow run: %s", error)


@contextmanager
def progress(execution: Execution) -> Iterator[None]:
    """Shows how far the stages of an execution are, while the block lasts."""
    bars = _Bars()
    execution.watchers.append(bars.stage)
    try:
        yield
    finally:
        execution.watchers.remove(bars.stage)
        bars.close()


class _Bar:
    """The progress artifact of one stage; made when it is first told of."""

    def __init__(self, bars: _Bars, label: str, unit: str):
        from prefect.context import TaskRunContext

        task = TaskRunContext.get()
        self.flow_run_id = task.task_run.flow_run_id if task else None
        self.task_run_id = task.task_run.id if task else None
        self.artifact: UUID | None = None
        """Only the thread that sends looks at it."""
        self._bars = bars
        self._label, self._unit = label, unit
        self._told = time.monotonic()
        self._last = (0, 0)
        self._there = False

    def __call__(self, done: int, total: int, values: Mapping[str, float] | None = None) -> None:
        self._last = (done, total)
        if total and time.monotonic() - self._told >= PATIENCE:
            self._told = time.monotonic()
            self._tell()

    def close(self) -> None:
        """The stage has ended: where it stood then is the last word."""
        if self._there:
            self._tell()

    def _tell(self) -> None:
        self._there = True
        done, total = self._last
        text = f"{self._label}: {done} of {total} {self._unit}"
        self._bars.send(self, min(100.0, 100.0 * done / total), text)


class _Bars:
    """Those of one run, and the thread that tells Prefect of them."""

    def __init__(self) -> None:
        self._words: queue.SimpleQueue[tuple[_Bar, float, str] | None] = queue.SimpleQueue()
        self._context = contextvars.copy_context()  # Prefect's settings
        self._thread: threading.Thread | None = None

    @contextmanager
    def stage(self, label: str, unit: str) -> Iterator[Progress]:
        """Follows one stage; entered by the task that runs it, and told by any thread."""
        bar = _Bar(self, label, unit)
        try:
            yield bar
        finally:
            bar.close()

    def send(self, bar: _Bar, share: float, text: str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._context.run, args=(self._send,), name="progress", daemon=True)
            self._thread.start()
        self._words.put((bar, share, text))

    def close(self) -> None:
        """Lets the last words be said, for a moment."""
        if self._thread is not None:
            self._words.put(None)
            self._thread.join(PATIENCE)

    def _send(self) -> None:
        from prefect import get_client
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        with get_client(sync_client=True) as client:
            while (words := self._words.get()) is not None:
                bar, share, text = words
                try:
                    if bar.artifact is not None:
                        client.update_artifact(bar.artifact, ArtifactUpdate(data=share, description=text))
                    else:
                        made = ArtifactCreate(
                            type="progress",
                            data=share,
                            description=text,
                            flow_run_id=bar.flow_run_id,
                            task_run_id=bar.task_run_id,
                        )
                        bar.artifact = client.create_artifact(made).id
                except Exception as error:  # noqa: BLE001  a server has many ways to fail, and the run needs none of it
                    logger.debug("Prefect was not told of %s: %s", text, error)
