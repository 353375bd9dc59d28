"""Task runners of Prefect for the places that are clusters (`components.compute.cluster`): Ray and Dask.

A task runner starts with the first job of its place and ends with the run. Each job is a task run of the flow, which
Prefect's UI shows. Its only parameter is the job as JSON data, and its result a few words; data pass through the
artifact store.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from components.compute.cluster import ClusterJob, ClusterPlace, run_job
from components.errors import EspalierError, ResourceError
from flows.execution.executor import environment
from flows.terminal.console import silence_prefect

if TYPE_CHECKING:
    from prefect.futures import PrefectFuture
    from prefect.task_runners import TaskRunner

logger = logging.getLogger(__name__)


class TaskRunners:
    """Task runners of one run, by place."""

    def __init__(self) -> None:
        self._runners: dict[str, TaskRunner] = {}
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._starter = ThreadPoolExecutor(1, "task runners")
        """Thread that lives as long as the run: Ray's processes end with the thread that starts them."""

    def submit(self, place: ClusterPlace, name: str, job: Mapping[str, Any]) -> ClusterJob:
        """Submit a job to the cluster of a place, from within the flow. Raise ResourceError if there is no cluster."""
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        from flows.orchestration.cluster_flow import sendable_context

        kind = name.partition(" ")[0]
        work = task(run_job, name=kind, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)
        with self._lock:  # a task runner may start its cluster at the first submission
            runner = self._runners.get(place.name) or self._start(place)
            with sendable_context():
                return _Submitted(runner.submit(work, {"job": dict(job)}), place, name)

    def close(self) -> None:
        """End the clusters that were started here, and leave the others."""
        self._stack.close()
        self._runners.clear()
        self._starter.shutdown()

    def _start(self, place: ClusterPlace) -> TaskRunner:
        variables = {name: value for name, value in environment().items() if name == "PYTHONPATH"}
        for name, value in place.variables.items():
            os.environ.setdefault(name, value)
        cls = getattr(importlib.import_module(place.package), place.task_runner)
        silence_prefect()
        try:
            start = self._starter.submit(self._stack.enter_context, cls(**place.options(variables)))
            runner: TaskRunner = start.result()
        except Exception as error:
            place_text = place.address or "a cluster on this machine"
            raise ResourceError(f"{place.name}: cannot use {place_text}: {type(error).__name__}: {error}") from error
        logger.info("%s: task runner %s started", place.name, place.task_runner)
        self._runners[place.name] = runner
        return runner


class _Submitted:
    """Job of a task runner."""

    def __init__(self, future: PrefectFuture, place: ClusterPlace, name: str):
        self._future = future
        self._place = place
        self._name = name

    def result(self, timeout: float) -> Mapping[str, Any] | None:
        try:
            result: Mapping[str, Any] = self._future.result(timeout=timeout)
        except TimeoutError:
            return None
        except Exception as error:
            text = f"{self._name}: its worker on {self._place.name} died: {type(error).__name__}: {error}"
            raise EspalierError(text) from error
        return result
