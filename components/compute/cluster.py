"""Stages on the workers of a cluster that Prefect's task runners drive (`prefect-ray`, `prefect-dask`).

A stage becomes one job: `run_job` starts `python -m flows.stage` on the worker that takes the job, as `ProcessRunner`
does on this machine, so the same code path serves all places. This module knows neither Prefect nor the cluster: the
context of the runner provides `submit`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import Field

from components.compute.place import Place
from components.compute.runners import (
    Event,
    ProcessRunner,
    Runner,
    RunnerStopped,
    StageProcess,
    StageResult,
    error_from_json,
    error_to_json,
    request_name,
)
from components.compute.watchdog import watch
from components.errors import EspalierError, Problem, ResourceError

if TYPE_CHECKING:
    from components.compute.runners import RunnerContext
    from components.inference.spec import InferenceSpec
    from components.models.precision import Hardware

logger = logging.getLogger(__name__)

POLL = 1.0
"""Seconds between two looks at a job."""
HIDDEN = ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_KEY")
"""Environment variables of a worker that its stages do not get."""


class ClusterJob(Protocol):
    """Submitted job."""

    def result(self, timeout: float) -> Mapping[str, Any] | None:
        """Return the result of `run_job`; None if it is still running after `timeout` seconds. Raise EspalierError if
        the worker died."""
        ...


class Submit(Protocol):
    """Function that submits a job to the cluster of a place. name: of the job, for the UI of Prefect."""

    def __call__(self, place: ClusterPlace, name: str, job: Mapping[str, Any]) -> ClusterJob: ...


class ClusterPlace(Place):
    """Cluster that a task runner of Prefect drives."""

    package: ClassVar[str]
    """Package of the task runner."""
    task_runner: ClassVar[str]
    """Class of the task runner in it."""
    variables: ClassVar[Mapping[str, str]] = {}
    """Environment variables that the package reads when it starts, unless they are set."""

    address: str | None = None
    """Address of a running cluster. null: a cluster on this machine for the time of the run."""
    workers: int = Field(2, ge=1)
    """Number of workers of the cluster on this machine, each of which computes one stage or shard at a time; without
    effect on a running cluster, which has its own."""
    root: str | None = None
    """Folder for work in progress on the workers of a running cluster; null: the root of the run, at the same path."""
    stall_timeout: float = Field(3600.0, ge=0)
    """Seconds without progress after which a worker ends a stage. 0: never."""

    @property
    def own_machines(self) -> bool:
        return self.address is not None

    def check_engine(self, name: str, engine: InferenceSpec) -> None:
        if self.address is None or engine.environment is None:  # else the workers have their own environments
            engine.check_prerequisites()

    @property
    def hardware(self) -> Hardware:
        return "this machine" if self.address is None else "unknown"

    @abstractmethod
    def options(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments of the task runner. environment: variables that workers on this machine need."""

    def describe(self) -> str:
        return self.address or f"{self.workers} workers on this machine"

    def prerequisites(self) -> Iterator[str]:
        if find_spec(self.package) is None:
            package = self.package.replace("_", "-")
            yield f"name: {self.name}: the package {package} is not installed; run pip install -e '.[{self.name}]'"

    def store_problems(self, name: str, store: str | None, workload: str) -> Iterator[Problem]:
        if self.address is not None and store is None:
            message = (
                f"null, but {workload} run on the workers of {self.address} ({name}); expected a URI that this machine "
                "and the workers reach: store=file:///SHARED/FOLDER or store=s3://BUCKET/PREFIX"
            )
            yield Problem("store", message)

    def parallel_problems(self, name: str, parallel: int) -> Iterator[Problem]:
        message = f"{parallel}: stages on {name} run one after the other, each in as many shards as compute.shards says"
        yield Problem("compute.parallel", f"{message}; expected 1")

    def refusal(self, name: str, stage: str, distributed: Any) -> str | None:
        if stage == "deploy":
            return "exports a policy; expected a place on this machine, such as compute.stages.deploy=process"
        return None

    def runner(self, name: str, context: RunnerContext) -> ClusterRunner:
        if context.submit is None:
            raise ResourceError(
                f"compute.places.{name}: {self.name} needs a Prefect flow, which only flows.run and flows.serve start; "
                "expected another place, such as compute=process"
            )
        return ClusterRunner(self, context.process, context.submit)


class ClusterRunner(Runner):
    """Runner of stages as jobs on the cluster of a place; several at once, from several threads."""

    def __init__(self, place: ClusterPlace, process: StageProcess, submit: Submit):
        self._place = place
        self._process = process
        self._submit = submit
        self._stopped = threading.Event()
        self.shares_servers = place.address is None

    def stop(self) -> None:
        """Wait for no running job any longer; `run` raises RunnerStopped. A worker finishes its job."""
        self._stopped.set()

    def run(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> StageResult:
        """Run one stage on a worker. Raise its error, and EspalierError if the worker died."""
        if self._stopped.is_set():
            raise RunnerStopped
        job = self._submit(self._place, request_name(request), self._job(request))
        while (result := job.result(POLL)) is None:
            if self._stopped.is_set():
                raise RunnerStopped
            on_event({"alive": True})
        if "error" in result:
            raise error_from_json(result["error"])
        return StageResult(result["key"], result["digest"], result["status"])

    def _job(self, request: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        return {
            "request": json.dumps(request),
            "root": str(self._place.root or process.root),
            "options": list(process.options),
            "module": process.module,
            "limit": process.limit,
            "stall_timeout": self._place.stall_timeout,
            "path": (process.environment or os.environ).get("PYTHONPATH", ""),
        }


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the stage of a job in a process of this machine, and return its key, digest and status, or its error."""
    request = json.loads(job["request"])
    root = Path(job["root"])
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    log = root / "logs" / f"cluster-{socket.gethostname()}-{os.getpid()}.log"
    process = StageProcess(
        root, log, environment | {"PYTHONPATH": job["path"]}, job["options"], job["limit"], job["module"]
    )
    runner = ProcessRunner(process)
    report = functools.partial(logger.error, "%s has stalled:\n%s", request_name(request))
    try:
        with watch(request_name(request), job["stall_timeout"], report, runner.stop) as dog:
            result = runner.run(request, lambda event: dog.pause() if "waiting" in event else dog.touch())
    except EspalierError as error:
        return {"error": error_to_json(error)}
    return {"key": result.key, "digest": result.digest, "status": result.status}
