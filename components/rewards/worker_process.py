"""Our own functions in a process beside this one, with a limit of time and of memory for each call.

What a model wrote can make a parser, a computer algebra system or a validator run for ever, and nothing in the same
process could end that. Calls and answers are lines of JSON. A process that takes too long is killed, and the next call
starts another; it ends with this one.

A call that exceeds its time (of the CPU, so that a busy machine is not taken for a costly answer), the memory or the
recursion limit, or ends its process twice, raises AnswerTooCostly.

    python -m components.rewards.worker_process MODULE:FUNCTION MODULE…      is how it is started
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
"""Bytes of addresses that the process may use."""
START = 120.0
"""Seconds until it must be ready: imports take a second or two, on a machine that is busy many more."""
PATIENCE = 10.0
"""Longest time of a call, in times of the CPU time that it may take."""


class _Ended(JudgeError):
    """The process ended in a call."""


class WorkerProcess:
    """Calls one of our functions, by `module:function`, in a process of its own. Arguments and what it returns are
    JSON data."""

    def __init__(self, function: str, seconds: float, imports: Sequence[str] = ()):
        """seconds: of CPU time that a call may take. imports: modules that the function imports, in which the first
        call should not spend its time."""
        self.function, self.seconds, self.imports = function, seconds, imports
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._turn = threading.Lock()

    def __call__(self, **arguments: Any) -> Any:
        """Return what the function returns. Raises AnswerTooCostly, or JudgeError if the function raised."""
        data = json.dumps(arguments) + "\n"
        with self._turn:
            try:
                answer = self._answer(data)
            except _Ended:  # by chance, perhaps
                try:
                    answer = self._answer(data)
                except _Ended as error:
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
        used = self._cpu_seconds()
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            raise _Ended(self._ended()) from None
        deadline = time.monotonic() + PATIENCE * self.seconds
        left = self.seconds
        while True:
            try:
                return json.loads(self._line(left))
            except queue.Empty:
                left = min(self.seconds - (self._cpu_seconds() - used), deadline - time.monotonic())
                if left <= 0:
                    _end(self._process)
                    raise AnswerTooCostly(f"not done after {self.seconds:g} s") from None
                left = max(left, 0.01)

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
            env={**_harmless(), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"},
        )
        weakref.finalize(self, _end, self._process)
        self._lines = queue.SimpleQueue()
        assert self._process.stdout is not None
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True, name="apart").start()
        why = f"a process for {self.function} did not start"
        try:
            self._line(START)
        except queue.Empty:
            _end(self._process)
            raise ResourceError(f"{why}: it was not ready after {START:g} s") from None
        except _Ended as error:
            raise ResourceError(f"{why}: {error}") from None

    def _line(self, seconds: float) -> str:
        """Return the next line. Raises queue.Empty if there is none yet."""
        line = self._lines.get(timeout=seconds)
        if not line:
            raise _Ended(self._ended())
        return line

    def _ended(self) -> str:
        assert self._process is not None
        return f"the process that computes it ended with {self._process.wait(10)}"


def _harmless() -> dict[str, str]:
    """Our environment without what may be a secret: the process reads text of a model."""
    return {
        name: os.environ[name]
        for name in ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")
        if name in os.environ
    }


def _read(lines: IO[str], into: queue.SimpleQueue[str]) -> None:
    with lines:
        for line in lines:
            into.put(line)
    into.put("")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # what was written last did not arrive any more
            process.stdin.close()
    process.wait()


def main(function: str, *imports: str) -> None:
    """Answers calls until there are no more."""
    module, _, name = function.partition(":")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    work = getattr(importlib.import_module(module), name)
    for one in imports:
        importlib.import_module(one)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer

    def tell(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    tell({"ready": True})
    for line in sys.stdin:
        try:
            tell({"result": work(**json.loads(line))})
        except (MemoryError, RecursionError) as error:
            tell({"limit": f"{type(error).__name__}: {error!s:.300}"})
        except Exception as error:  # noqa: BLE001  told to whoever asked
            tell({"error": f"{type(error).__name__}: {error!s:.300}"})


if __name__ == "__main__":
    main(*sys.argv[1:])
