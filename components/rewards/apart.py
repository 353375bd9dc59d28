"""Our own functions in a process beside this one, with a limit of time and of memory for each call.

What a model wrote can make a parser, a computer algebra system or a validator run for ever, and nothing in the same
process could end that. Calls and answers are lines of JSON. A process that takes too long is killed, and the next call
starts another; it ends with this one.

    python -m components.rewards.apart MODULE:FUNCTION MODULE…      is how it is started
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
import weakref
from collections.abc import Sequence
from typing import IO, Any

from components.errors import JudgeError, ResourceError

MEMORY = 4 * 1024**3
"""Bytes of addresses that the process may use."""
START = 120.0
"""Seconds until it must be ready: imports take a second or two, on a machine that is busy many more."""


class Apart:
    """Calls one of our functions, by `module:function`, in a process of its own. Arguments and what it returns are
    JSON data."""

    def __init__(self, function: str, seconds: float, imports: Sequence[str] = ()):
        """seconds: that a call may take. imports: modules that the function imports, in which the first call should
        not spend its time."""
        self.function, self.seconds, self.imports = function, seconds, imports
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._turn = threading.Lock()

    def __call__(self, **arguments: Any) -> Any:
        """What the function returns. Raises JudgeError where it raised, or was not done in time."""
        with self._turn:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(arguments) + "\n")
                self._process.stdin.flush()
            except OSError:
                raise JudgeError(self._ended()) from None
            answer = json.loads(self._line(self.seconds))
        if "error" in answer:
            raise JudgeError(answer["error"])
        return answer["result"]

    def _start(self) -> None:
        paths = [os.getcwd(), *(entry for entry in sys.path if entry)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "components.rewards.apart", self.function, *self.imports],
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
        try:
            self._line(START)
        except JudgeError as error:
            raise ResourceError(f"a process for {self.function} did not start: {error}") from None

    def _line(self, seconds: float) -> str:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            assert self._process is not None
            _end(self._process)
            raise JudgeError(f"not done after {seconds:g} s") from None
        if not line:
            raise JudgeError(self._ended())
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
        except (Exception, RecursionError) as error:  # noqa: BLE001  told to whoever asked
            tell({"error": f"{type(error).__name__}: {error!s:.300}"})


if __name__ == "__main__":
    main(*sys.argv[1:])
