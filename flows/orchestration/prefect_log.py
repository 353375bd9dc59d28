"""Console lines and warnings of a run in the logs of its flow run, which Prefect's UI shows.

A thread sends them, so the run never waits for the server. If the server is unreachable, the rows wait for it in a
bounded queue; the log file has everything. Prefect's own sender is off (`flows.terminal.console.silence_prefect`): it
masks nothing, and it reports failures of the server on stderr in the middle of the console's output.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import queue
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from flows.terminal.console import FILE_ONLY, BriefFormatter

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds in which rows are collected for one request."""
TIMEOUT = 3.0
"""Seconds that a request, and the end of a run, may wait for the server."""
RETRY = 5.0
"""Seconds after which rows are sent again to a server that did not accept them."""
MOST_ROWS = 1000
"""Maximum number of rows in a request and in the queue; further ones are dropped."""
LONGEST_ROW = 10_000
"""Maximum number of characters of a row."""
RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")
"""Prefect's loggers of states, whose warnings name a failed stage with its reason."""


class PrefectLog(logging.Handler):
    """Handler of the root logger inside a block. `connect` starts the sending; earlier rows wait for it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(BriefFormatter("%(message)s"))
        self.addFilter(_shown)
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_ROWS)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
        self.stop()
        self.close()

    def connect(self, flow_run_id: str) -> None:
        """Send the rows to this flow run, with the Prefect settings of the calling context."""
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._send, flow_run_id), name="prefect log", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Wait up to `TIMEOUT` seconds until the rows are sent. Further rows are dropped."""
        self._ended.set()
        if self._thread is not None:
            self._put(None)
            self._thread.join(TIMEOUT)

    def emit(self, record: logging.LogRecord) -> None:
        if self._ended.is_set():
            return
        try:
            message = self.format(record)
        except Exception:  # noqa: BLE001  as in logging: wrong arguments of a message end no run
            self.handleError(record)
            return
        if len(message) > LONGEST_ROW:
            message = f"{message[:LONGEST_ROW]}… ({len(message)} characters)"
        created = datetime.fromtimestamp(record.created, UTC).isoformat()
        row = {"name": record.name, "level": record.levelno, "message": message, "timestamp": created}
        self._put({**row, "task_run_id": _task_run_id() if self._thread is not None else None})

    def _put(self, row: dict[str, Any] | None) -> None:
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(row)

    def _send(self, flow_run_id: str) -> None:
        from prefect import get_client
        from prefect.settings import temporary_settings

        rows: list[dict[str, Any]] = []
        no_retries = temporary_settings({"client.max_retries": 0})  # the rows are sent again after `RETRY` seconds
        own_client = {"timeout": TIMEOUT}  # with settings of its own, Prefect does not share the flow's client
        failed = False
        with no_retries, get_client(httpx_settings=own_client, sync_client=True) as client:
            while self._collect(rows):
                error = _error(client, [{**row, "flow_run_id": flow_run_id} for row in rows])
                if error is not None and not failed:
                    logger.info("cannot send the log to the Prefect server: %s", error)
                failed = error is not None
                if failed and self._ended.wait(RETRY):
                    return
                if not failed:
                    rows.clear()

    def _collect(self, rows: list[dict[str, Any]]) -> bool:
        """Append waiting rows, those of the `INTERVAL` after the first included. Return False if there are none and
        the log has ended."""
        timeout = 0.0 if rows or self._ended.is_set() else None
        until = None
        with contextlib.suppress(queue.Empty):
            while len(rows) < MOST_ROWS and (row := self._rows.get(timeout=timeout)) is not None:
                rows.append(row)
                until = until or time.monotonic() + INTERVAL
                timeout = 0.0 if self._ended.is_set() else max(0.0, until - time.monotonic())
        return bool(rows)


def _error(client: SyncPrefectClient, rows: list[dict[str, Any]]) -> Exception | None:
    """Send rows. Return the error if they should be sent again; rows that the server rejects are dropped."""
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        client.create_logs(rows)
    except PrefectHTTPStatusError as error:
        if error.response.status_code >= 500:
            return error
        logger.info("the Prefect server rejected %d log rows: %s", len(rows), error)
    except Exception as error:  # noqa: BLE001  no failure of the server may fail the run
        return error
    return None


def _shown(record: logging.LogRecord) -> bool:
    """Return True for the lines and warnings that the console shows, and for failures of the run and its stages."""
    if record.name == "flows.terminal.console":
        return True
    return record.levelno >= logging.WARNING and (record.name in RUN_LOGGERS or not record.name.startswith(FILE_ONLY))


def _task_run_id() -> str | None:
    """Return the id of the stage's task run, if this thread runs one."""
    from prefect.context import TaskRunContext

    context = TaskRunContext.get()
    return None if context is None else str(context.task_run.id)
