"""Functions of the project in a child process, with limits on the CPU time and the memory of a call.

Text from a model can make a parser, a computer algebra system or a validator run forever, and code in the same process
cannot be interrupted. A child that exceeds its time is killed, and the next call starts a new one.

A call raises AnswerTooCostly if it exceeds its CPU time (so that a busy machine does not count against it), the memory
limit or the recursion limit, or if its process exits twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from components.errors import AnswerTooCostly, JudgeError, ResourceError
from components.json_process import (
    JsonProcess,
    JsonProgram,
    ProcessExited,
    RequestFailed,
    import_path,
    safe_environment,
    wait_for,
)

MEMORY = 4 * 1024**3
"""Address space limit of the child, in bytes."""
START = 600.0
"""Seconds until the child must be ready: imports take a second or two, and longer on a busy machine."""
PATIENCE = 10.0
"""Wall-clock limit of a call, as a multiple of its CPU time limit."""
LONGEST_ERROR = 300
"""Maximum length of the message of an exception in characters."""


class WorkerProcess:
    """Callable proxy of a function `module:function` that runs in a child process. Arguments and results are JSON
    data."""

    def __init__(self, function: str, seconds: float, imports: Sequence[str] = ()):
        """Set the function. seconds: CPU time limit of a call. imports: modules that the function needs; the child
        imports them at its start, so that the first call does not spend its time on them."""
        self.function, self.seconds, self.imports = function, seconds, tuple(imports)
        self._process: JsonProcess | None = None
        self._lock = threading.Lock()

    def __call__(self, **arguments: Any) -> Any:
        """Return the function's result. Raises AnswerTooCostly, or JudgeError if the function raised."""
        with self._lock:
            try:
                try:
                    return self._call(arguments)
                except ProcessExited:  # possibly a transient failure
                    return self._call(arguments)
            except ProcessExited as error:
                raise AnswerTooCostly(f"the process that computes it ended with {error.code}") from None
            except RequestFailed as error:
                costly = error.kind in ("MemoryError", "RecursionError")
                kind = AnswerTooCostly if costly else JudgeError
                raise kind(f"{error.kind}: {error.text:.{LONGEST_ERROR}}") from None

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        process = self._process
        if process is None or not process.alive:
            process = self._process = self._start()
        cpu_limit = _cpu_seconds(process) + self.seconds
        deadline = time.monotonic() + PATIENCE * self.seconds

        def expired() -> str:
            over = _cpu_seconds(process) >= cpu_limit or time.monotonic() >= deadline
            return f"not done after {self.seconds:g} s" if over else ""

        try:
            return wait_for(process.request(arguments), expired)
        except TimeoutError as error:
            process.kill()
            raise AnswerTooCostly(str(error)) from None

    def _start(self) -> JsonProcess:
        variables = {**safe_environment(), "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
        limits = {"RLIMIT_AS": MEMORY}
        process = JsonProcess(JsonProgram(self.function, variables=variables, imports=self.imports, limits=limits))
        try:
            process.ready.result(START)
        except (ProcessExited, TimeoutError) as error:
            process.kill()
            reason = str(error) or f"it was not ready after {START:g} s"
            raise ResourceError(f"a process for {self.function} did not start: {reason}") from None
        return process


def _cpu_seconds(process: JsonProcess) -> float:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
