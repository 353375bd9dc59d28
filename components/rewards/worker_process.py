"""Subprocess worker that runs the project's own functions with a time and memory limit per call.

Text from a model can make a parser, a computer algebra system or a validator run forever, and code in the same process
cannot be interrupted. Requests and responses are lines of JSON. A worker that exceeds its time is killed, and the next
call starts a new one. The worker ends with its parent process.

A call raises AnswerTooCostly if it exceeds its CPU time (so that a busy machine does not count against it), the memory
limit or the recursion limit, or if its process exits twice.

    python -m components.rewards.worker_process MODULE:FUNCTION MODULE…      starts the worker
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import IO, Any

import psutil

from components.errors import AnswerTooCostly, JudgeError, ResourceError

MEMORY = 4 * 1024**3
"""Address space limit of the worker, in bytes."""
START = 600.0
"""Seconds until the worker must be ready: imports take a second or two, and longer on a busy machine."""
PATIENCE = 10.0
"""Wall-clock limit of a call, as a multiple of its CPU time limit."""


class _WorkerExited(JudgeError):
    """The worker exited during a call."""


class WorkerProcess:
    """Callable proxy of a function `module:function` that runs in a subprocess. Arguments and results are JSON data."""

    def __init__(self, function: str, seconds: float, imports: Sequence[str] = ()):
        """Set the function. seconds: CPU time limit of a call. imports: modules that the function needs; the worker
        imports them at its start, so that the first call does not spend its time on them."""
        self.function, self.seconds, self.imports = function, seconds, imports
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def __call__(self, **arguments: Any) -> Any:
        """Return the function's result. Raises AnswerTooCostly, or JudgeError if the function raised."""
        data = json.dumps(arguments) + "\n"
        with self._lock:
            try:
                answer = self._answer(data)
            except _WorkerExited:  # possibly a transient failure
                try:
                    answer = self._answer(data)
                except _WorkerExited as error:
                    raise AnswerTooCostly(str(error)) from None
        if "limit" in answer:
            raise AnswerTooCostly(answer["limit"])
        if "error" in answer:
            raise JudgeError(answer["error"])
        return answer["result"]

    def _answer(self, data: str) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        cpu_before = self._cpu_seconds()
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            raise _WorkerExited(self._exit_message()) from None
        deadline = time.monotonic() + PATIENCE * self.seconds
        remaining = self.seconds
        while True:
            try:
                return json.loads(self._line(remaining))
            except queue.Empty:
                remaining = min(self.seconds - (self._cpu_seconds() - cpu_before), deadline - time.monotonic())
                if remaining <= 0:
                    _kill(self._process)
                    raise AnswerTooCostly(f"not done after {self.seconds:g} s") from None
                remaining = max(remaining, 0.01)

    def _cpu_seconds(self) -> float:
        assert self._process is not None
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def _start(self) -> None:
        paths = [os.getcwd(), *(entry for entry in sys.path if entry)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "components.rewards.worker_process", self.function, *self.imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**_safe_environment(), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"},
        )
        weakref.finalize(self, _kill, self._process)
        self._lines = queue.SimpleQueue()
        assert self._process.stdout is not None
        threading.Thread(target=_enqueue, args=(self._process.stdout, self._lines), daemon=True, name="apart").start()
        message = f"a process for {self.function} did not start"
        try:
            self._line(START)
        except queue.Empty:
            _kill(self._process)
            raise ResourceError(f"{message}: it was not ready after {START:g} s") from None
        except _WorkerExited as error:
            raise ResourceError(f"{message}: {error}") from None

    def _line(self, seconds: float) -> str:
        """Return the next line. Raises queue.Empty if there is none yet."""
        line = self._lines.get(timeout=seconds)
        if not line:
            raise _WorkerExited(self._exit_message())
        return line

    def _exit_message(self) -> str:
        assert self._process is not None
        return f"the process that computes it ended with {self._process.wait(10)}"


def _safe_environment() -> dict[str, str]:
    """Return the environment without variables that may hold secrets: the worker reads model output."""
    return {
        name: os.environ[name]
        for name in ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")
        if name in os.environ
    }


def _enqueue(lines: IO[str], into: queue.SimpleQueue[str]) -> None:
    with lines:
        for line in lines:
            into.put(line)
    into.put("")


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # the pipe is already closed
            process.stdin.close()
    process.wait()


def main(function: str, *imports: str) -> None:
    """Answer calls until stdin is closed."""
    module, _, name = function.partition(":")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    target = getattr(importlib.import_module(module), name)
    for import_name in imports:
        importlib.import_module(import_name)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to stderr, not into the responses

    def respond(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    respond({"ready": True})
    for line in sys.stdin:
        try:
            respond({"result": target(**json.loads(line))})
        except (MemoryError, RecursionError) as error:
            respond({"limit": f"{type(error).__name__}: {error!s:.300}"})
        except Exception as error:  # noqa: BLE001  reported to the caller
            respond({"error": f"{type(error).__name__}: {error!s:.300}"})


if __name__ == "__main__":
    main(*sys.argv[1:])
