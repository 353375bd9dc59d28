"""Functions of the project in a child process, with limits on the CPU time and the memory of a call.

Text from a model can make a parser, a computer algebra system or a validator run forever, as can the chat template of a
downloaded model, and code in the same process cannot be interrupted. A child that exceeds its time is killed, and the
next call starts a new one.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from components.errors import ResourceError
from components.json_process import (
    JsonProcess,
    JsonProgram,
    ProcessExited,
    RequestFailed,
    safe_environment,
    wait_for,
)

MEMORY = 4 * 1024**3
"""Default address space limit of the child, in bytes."""
START = 600.0
"""Seconds until the child must be ready: imports take a second or two, and longer on a busy machine."""
PATIENCE = 10.0
"""Wall-clock limit of a call, as a multiple of its CPU time limit."""
LONGEST_ERROR = 300
"""Maximum length of the message of an exception in characters."""


class CallTooCostly(Exception):
    """Call that exceeded its CPU time (so that a busy machine does not count against it), the memory limit or the
    recursion limit, or whose process exited twice."""


class WorkerProcess:
    """Callable proxy of a function that runs in a child process. Arguments and results are JSON data."""

    def __init__(self, function: str, seconds: float, imports: Sequence[str] = (), memory: int = MEMORY):
        """Set the function, `MODULE:NAME` or `FILE.py:NAME`. seconds: CPU time limit of a call. imports: modules that
        the function needs; the child imports them at its start, so that the first call does not spend its time on them.
        memory: address space limit of the child, in bytes."""
        self.seconds, self.memory = seconds, memory
        variables = {**safe_environment(), "OMP_NUM_THREADS": "1"}
        limits = {"RLIMIT_AS": memory, "RLIMIT_CORE": 0}
        self._program = JsonProgram(
            function, variables=variables, imports=tuple(imports), limits=limits, seconds_per_call=seconds
        )
        self._process: JsonProcess | None = None
        self._lock = threading.Lock()

    def __call__(self, **arguments: Any) -> Any:
        """Return the function's result. Raises CallTooCostly, RequestFailed if the function raised, or ResourceError if
        the process does not start."""
        with self._lock:
            try:
                try:
                    return self._call(arguments)
                except ProcessExited:  # possibly a transient failure
                    return self._call(arguments)
            except ProcessExited as error:
                raise CallTooCostly(f"the process that computes it ended with {error.code}") from None
            except RequestFailed as error:
                if error.kind in ("MemoryError", "RecursionError"):
                    raise CallTooCostly(f"{error.kind}: {error.text:.{LONGEST_ERROR}}".removesuffix(": ")) from None
                raise RequestFailed(error.kind, error.text[:LONGEST_ERROR]) from None

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        if self._process is None:
            self._process = self._start()
        process = self._process
        deadline = time.monotonic() + PATIENCE * self.seconds
        late = f"not done after {self.seconds:g} s"
        try:
            return wait_for(process.request(arguments), lambda: late if time.monotonic() >= deadline else "")
        except TimeoutError:
            process.kill()
            self._process = None
            raise CallTooCostly(late) from None
        except ProcessExited as error:
            self._process = None
            if error.code == -signal.SIGPROF:
                raise CallTooCostly(late) from None
            raise

    def _start(self) -> JsonProcess:
        process = JsonProcess(self._program)
        try:
            process.ready.result(START)
        except (ProcessExited, TimeoutError) as error:
            process.kill()
            reason = str(error) or f"it was not ready after {START:g} s"
            raise ResourceError(f"a process for {self._program.target} did not start: {reason}") from None
        return process
