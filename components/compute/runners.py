"""Runners of a stage: in this process, or in a subprocess.

A runner takes a stage request (JSON data) and returns its result. `LocalRunner` calls a function in this process.
`ProcessRunner` starts a command and reads JSON lines from it: progress while it works, the result at the end. The
command here is `python -m flows.stage`; the same protocol serves a process on another machine.

A child never outlives its parent: its standard input is a pipe from us, and it ends when that pipe is closed, also when
we are killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, runtime_checkable

from components import errors
from components.errors import EspalierError, Problem, SpecError, WaitTimeout
from components.models.gpus import VISIBLE, visible_gpus

if TYPE_CHECKING:
    from components.compute.cluster import Submit
    from components.compute.snapshot import Snapshot

logger = logging.getLogger(__name__)

Event = Mapping[str, Any]
"""Line of a stage's report: `{"progress": [done, total, values]}`, `{"waiting": text}` or the result."""

STAGE = "flows.stage"
"""Module that runs one stage, as `python -m`."""
LIMIT = 7 * 24 * 3600.0
"""Time limit of one stage in seconds."""
DUMP_SECONDS = 0.5
"""Seconds that a child that timed out gets to write its stacks to the log."""
GRACE = 3.0
"""Seconds that a child gets to end by itself before it is killed."""


@dataclass(frozen=True)
class StageResult:
    """Result of a stage."""

    key: str
    digest: str
    status: str
    """`ran` or `cached`."""


Execute = Callable[[Mapping[str, Any], Callable[[Event], None]], StageResult]
"""Function that runs the stage of a request and reports its events."""


@dataclass(frozen=True)
class StageProcess:
    """Process that runs stages."""

    root: Path
    """Run root on this machine."""
    log: Path
    """File for the process's standard error."""
    environment: Mapping[str, str] | None = None
    """Environment variables; None inherits those of this process."""
    options: Sequence[str] = ()
    """Options of the module besides request and root, such as the store."""
    limit: float = LIMIT
    """Time limit of one stage in seconds."""
    module: str = STAGE
    """Module that takes the requests."""
    distributed: Sequence[str] = ()
    """Stages in which several processes can train together."""

    @property
    def command(self) -> list[str]:
        """Command of the process on this machine."""
        return [sys.executable, "-m", self.module, *self.options]


def on_own_gpu(process: StageProcess, lane: int) -> StageProcess:
    """Return the process with one GPU of this machine, another one for each lane as far as they suffice."""
    gpus = visible_gpus()
    if len(gpus) < 2:
        return process
    inherited = os.environ if process.environment is None else process.environment
    return replace(process, environment={**inherited, VISIBLE: gpus[lane % len(gpus)]})


@dataclass(frozen=True)
class RunnerContext:
    """Part of a run that its runners share."""

    run: str
    """Short id of the run."""
    log: Path
    """Log of the run, for logs beside it."""
    process: StageProcess
    execute: Execute
    """Runs a stage in this process."""
    code: Path
    """Folder of the code."""
    packages: Sequence[str]
    """The user's packages besides the code."""
    say: Callable[[str], None]
    """Shows a line to the user."""
    submit: Submit | None = None
    """Submits jobs to clusters; None outside of a Prefect flow."""
    lane: int = 0
    """Number of the runner among those whose stages run at the same time."""


class Runner(ABC):
    """Runner of the stages of one run on one place."""

    shares_servers: bool = False
    """True if stages run in another process of this machine, which can use the model servers of this process."""
    snapshot: Snapshot | None = None
    """Copy of the code that stages run; None if they run the code itself."""

    @abstractmethod
    def run(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> StageResult:
        """Run one stage to its end. Raise the stage's error."""

    def close(self, wait: float = 1.0) -> None:  # noqa: B027  most runners keep nothing between stages
        """End what the runner keeps between stages. wait: maximum seconds for an end that continues without this
        process."""


@runtime_checkable
class StoppableRunner(Protocol):
    """Runner whose stages another thread can stop."""

    def stop(self) -> None:
        """Stop the running stages, and start no more: `run` raises RunnerStopped."""
        ...

    def run(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> StageResult: ...


class RunnerStopped(KeyboardInterrupt):
    """Interruption of a runner by `stop` from another thread."""


class LocalRunner(Runner):
    """Runner in this process, where loaded models are reused between stages."""

    def __init__(self, execute: Execute):
        self._execute = execute

    def run(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> StageResult:
        return self._execute(request, on_event)


class ProcessRunner(Runner):
    """Runner with one subprocess per stage; several at once, from several threads. `KeptProcessRunner` reuses one.

    command: replaces that of `process`. `--request FILE root=DIR` is added.
    """

    shares_servers = True

    def __init__(self, process: StageProcess, command: Sequence[str] | None = None):
        self._process = process
        self._command = process.command if command is None else list(command)
        self._running: set[subprocess.Popen] = set()
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """End the running stages, from another thread, and start no more: `run` raises RunnerStopped."""
        with self._lock:
            self._stopped.set()
            running = list(self._running)
        for child in running:
            _quit(child)

    @property
    def stopped(self) -> bool:
        """True after `stop`."""
        return self._stopped.is_set()

    def run(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> StageResult:
        """Run one stage. Raises the stage's error (of our own tree), EspalierError if the child died otherwise,
        WaitTimeout after `limit` seconds, and RunnerStopped. A KeyboardInterrupt ends the child too."""
        self._process.log.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="espalier-") as folder, open(self._process.log, "ab") as log:
            file = Path(folder) / "request.json"
            file.write_text(json.dumps(request), encoding="utf-8")
            command = [*self._command, "--request", str(file), f"root={self._process.root}"]
            child = self._start(command, log)
            try:
                result = self._follow(child, request, on_event)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE)  # it has sent its result and is exiting
                return result
            finally:
                self._end(child)

    def _start(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen:
        with self._lock:
            if self._stopped.is_set():
                raise RunnerStopped
            child = subprocess.Popen(
                command,
                env=self._process.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C reaches only us; we end the child
            )
            self._running.add(child)
            return child

    def _end(self, child: subprocess.Popen) -> None:
        end(child)
        self._running.discard(child)

    def _follow(
        self, child: subprocess.Popen, request: Mapping[str, Any], on_event: Callable[[Event], None]
    ) -> StageResult:
        try:
            return self._events(child, request, on_event)
        except WaitTimeout:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGUSR1)  # makes it write its stacks to the log
                time.sleep(DUMP_SECONDS)
            raise
        except EspalierError:
            if self._stopped.is_set():
                raise RunnerStopped from None
            raise

    def _events(
        self, child: subprocess.Popen, request: Mapping[str, Any], on_event: Callable[[Event], None]
    ) -> StageResult:
        assert child.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            child.send_signal(signal.SIGUSR1)
            time.sleep(DUMP_SECONDS)
            child.kill()

        timer = threading.Timer(self._process.limit, expire)
        timer.daemon = True
        timer.start()
        last: Event = {}
        try:
            for line in child.stdout:
                last = json.loads(line)
                if "status" in last or "error" in last:
                    break
                on_event(last)
        finally:
            timer.cancel()
        stage = request.get("stage", "stage")
        if "status" in last:
            return StageResult(last["key"], last["digest"], last["status"])
        if "error" in last:
            raise error_from_json(last["error"])
        code = child.wait(GRACE)
        if expired.is_set():
            raise WaitTimeout(f"{stage} timed out after {self._process.limit:.0f} s in its subprocess")
        cause = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        raise EspalierError(
            f"the process of {stage} ended {cause} without a result; its last output is in {self._process.log}"
        )


class KeptProcessRunner(ProcessRunner):
    """Runner that reuses one subprocess, for one stage at a time, so that loaded models are reused. The process is
    started for the first stage, restarted if it has died, and ends with `close`; it reads requests as lines
    (`--requests`). A stage that begins while another one runs gets a process for itself.

    only: returns the part of a request that is equal for all stages of a process; another one starts a new process."""

    def __init__(
        self,
        process: StageProcess,
        command: Sequence[str] | None = None,
        only: Callable[[Mapping[str, Any]], Any] = lambda request: None,
    ):
        super().__init__(process, command)
        self._only = only
        self._part: Any = None
        self._child: subprocess.Popen | None = None
        self._busy = threading.Lock()

    def another(self, lane: int) -> KeptProcessRunner:
        """Return a runner of the same stages with a process of its own, on the GPU of a lane."""
        return KeptProcessRunner(on_own_gpu(self._process, lane), self._command, self._only)

    def run(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> StageResult:
        """Run one stage, as ProcessRunner does. After a failed stage the next one gets a new process."""
        if not self._busy.acquire(blocking=False):
            return super().run(request, on_event)
        try:
            return self._run_kept(request, on_event)
        finally:
            self._busy.release()

    def _run_kept(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> StageResult:
        died, part = self._child is not None and self._child.poll() is not None, self._only(request)
        if died or self._part != part:
            self.close()  # also after its death: processes that it started end with its pipes
        self._part = part
        events: list[Event] = []

        def listen(event: Event) -> None:
            events.append(event)
            on_event(event)

        reused = self._child is not None
        try:
            return self._answer(request, listen)
        except EspalierError as error:
            if not reused or events or type(error) is not EspalierError:
                raise
        return self._answer(request, on_event)  # the process was dying since the stage before

    def _answer(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> StageResult:
        child = self._child
        if child is None:
            self._process.log.parent.mkdir(parents=True, exist_ok=True)
            with open(self._process.log, "ab") as log:
                child = self._child = self._start([*self._command, "--requests", f"root={self._process.root}"], log)
        assert child.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died; its report is read below
                child.stdin.write(json.dumps(request) + "\n")
                child.stdin.flush()
            return self._follow(child, request, on_event)
        except BaseException:  # its further output would be taken for the answer to the next request
            self.close()
            raise

    def close(self, wait: float = 1.0) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            self._end(child)


def end(child: subprocess.Popen) -> None:
    """End a child process and its session: terminate it, wait `GRACE` seconds, then kill."""
    _quit(child)
    for pipe in (child.stdin, child.stdout):  # not earlier: a closed pipe would end it before its cleanup
        if pipe is not None and not pipe.closed:
            pipe.close()


def _quit(child: subprocess.Popen) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait(GRACE)


def error_to_json(error: EspalierError) -> dict[str, Any]:
    """Return an error of our own tree as JSON data."""
    data: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, SpecError):
        data["problems"] = [[problem.path, problem.message, problem.nearest] for problem in error.problems]
    return data


def error_from_json(data: Mapping[str, Any]) -> EspalierError:
    """Return the error from its JSON data; EspalierError for a type that is not in the tree."""
    kind = getattr(errors, data["type"], None)
    if kind is SpecError:
        return SpecError([Problem(*problem) for problem in data["problems"]])
    if isinstance(kind, type) and issubclass(kind, EspalierError):
        return kind(data["message"])
    return EspalierError(f"{data['type']}: {data['message']}")


def request_name(request: Mapping[str, Any]) -> str:
    """Return the name of a requested stage, for messages: `train`, `collect shard 1/4`."""
    spec = request.get("spec", {})
    if "index" in spec and "count" in spec:
        return f"{spec['stage']} {request['stage']} {spec['index'] + 1}/{spec['count']}"
    return str(request["stage"])
