"""Child processes that answer requests, as lines of JSON over stdin and stdout.

    process = JsonProcess(JsonProgram("package.module:function", limits={"RLIMIT_AS": 2**32}))
    process.request({"x": 1}).result(timeout=10)                   # function(x=1), computed in the child
    await asyncio.wrap_future(process.request({"x": 2}))           # on an event loop

The child runs `components.json_worker`. Nothing is unpickled, and a child is untrusted: the size of a response is
limited, and a child that violates the protocol is killed. When a child dies, every request without a response fails
with ProcessExited, which holds the end of the child's stderr. A child ends with its parent.

Sending a request never blocks. Time limits are those of the caller, which kills a child that exceeds them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

WORKER = Path(__file__).with_name("json_worker.py")
MAX_RESPONSE = 64 << 20
"""Maximum size of a response in bytes."""
STDERR_TAIL = 1000
"""Maximum length of the stderr in `ProcessExited`, in bytes."""
EXIT = 5.0
"""Time that a child has to exit after the end of its responses, in seconds; it is then killed."""
EXIT_POLL = 0.01
"""Seconds between two checks whether a child has exited."""
POLL = 0.1
"""Seconds between two checks by `wait_for`."""
READY = 0
"""Id of the response with which a child says that it is ready."""


class ProcessExited(Exception):
    """Exit of a child process. code: its exit code, or the negative number of the signal that ended it."""

    def __init__(self, code: int, stderr: str):
        self.code, self.stderr = code, stderr
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        super().__init__(reason + (f"; stderr: {stderr}" if stderr else ""))


class RequestFailed(Exception):
    """Exception raised by the function in the child. kind: name of its class; text: its message."""

    def __init__(self, kind: str, text: str):
        self.kind, self.text = kind, text
        super().__init__(f"{kind}: {text}")


def safe_environment() -> dict[str, str]:
    """Return the environment without variables that may hold secrets, and with the import path of this process, for a
    child that reads untrusted text."""
    names = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")
    return {name: os.environ[name] for name in names if name in os.environ} | {"PYTHONPATH": _import_path()}


def _import_path() -> str:
    return os.pathsep.join(dict.fromkeys(os.path.abspath(entry) for entry in ["", *sys.path]))


@dataclass(frozen=True)
class JsonProgram:
    """A function for a child process, and the options of the process."""

    target: str
    """`MODULE:NAME` or `FILE.py:NAME` of a function, or of a class whose instance is called."""
    python: Sequence[str] = (sys.executable,)
    """Interpreter and its options."""
    variables: Mapping[str, str] | None = None
    """Environment variables; None takes those of this process and its import path."""
    imports: Sequence[str] = ()
    """Modules that the child imports before it is ready."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Resource limits by their names in the module `resource`, such as RLIMIT_AS."""
    seconds_per_call: float = 0.0
    """CPU time limit of a call; a child that exceeds it ends by SIGPROF. 0: no limit. Not for async targets."""
    folder: str | None = None
    """Working directory; None takes that of this process."""
    new_session: bool = False
    """True starts a session: the processes that the child has started are killed once it exits or is killed."""
    completes_calls: bool = False
    """True completes a call in progress after the end of the parent; this saves a thread, so 75 MB of RLIMIT_AS."""
    show_stderr: bool = False
    """True forwards stderr to that of this process, without a copy in `ProcessExited`."""

    def call(self, arguments: Mapping[str, Any], timeout: float) -> Any:
        """Return the result of one call in a child of its own.

        Raises TimeoutError, ProcessExited, RequestFailed, and OSError if the interpreter cannot be started.
        """
        process = JsonProcess(self)
        try:
            return process.request(arguments).result(timeout)
        finally:
            process.kill()


class JsonProcess:
    """A running child. Raises OSError if its interpreter cannot be started.

    ready: done when the child has imported its target. A child is killed when its object is garbage-collected.
    """

    def __init__(self, program: JsonProgram):
        options = {
            "target": program.target,
            "imports": list(program.imports),
            "limits": dict(program.limits),
            "seconds_per_call": program.seconds_per_call,
            "completes_calls": program.completes_calls,
        }
        variables = program.variables
        self._process = subprocess.Popen(
            [*program.python, "-P", str(WORKER), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if program.show_stderr else subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": _import_path()} if variables is None else dict(variables),
            cwd=program.folder,
            start_new_session=program.new_session,
        )
        self._responses = _Responses()
        self.ready: Future[Any] = self._responses.expect(READY)
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._numbers = itertools.count(READY + 1)
        self.kill = weakref.finalize(self, _end, self._process, self._requests, program.new_session)
        """Kills the child, and waits for its exit."""
        tail = bytearray()
        try:  # the threads hold no reference to this object, so it can be garbage-collected
            stderr = _start_thread(_collect, self._process.stderr, tail)
            _start_thread(_write, self._process, self._requests)
            self._reader = _start_thread(_read, self._process, self._responses, program.new_session, stderr, tail)
        except RuntimeError:  # the system allows no further thread
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not _exited(self._process)

    def request(self, arguments: Mapping[str, Any]) -> Future[Any]:
        """Send a request; return the future of its result, which may raise ProcessExited or RequestFailed."""
        number = next(self._numbers)
        line = json.dumps({"id": number, "arguments": arguments}).encode() + b"\n"
        response = self._responses.expect(number)
        self._requests.put(line)
        return response

    def close(self, timeout: float) -> None:
        """Let the child close its target and exit; kill it after the timeout, in seconds."""
        self._requests.put(b"")
        self._reader.join(timeout)
        self.kill()


def wait_for(response: Future[Any], expired: Callable[[], str]) -> Any:
    """Return a response. `expired` is called repeatedly; once it returns a reason, TimeoutError is raised with it."""
    while True:
        try:
            return response.result(POLL)
        except TimeoutError:
            if reason := expired():
                raise TimeoutError(reason) from None


class _Responses:
    """Futures of the requests without a response, by id."""

    def __init__(self) -> None:
        self._futures: dict[int, Future[Any]] = {}
        self._error: ProcessExited | None = None
        self._lock = threading.Lock()

    def expect(self, number: int) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: the child computes the response anyway
        with self._lock:
            if self._error is None:
                self._futures[number] = future
                return future
        future.set_exception(self._error)
        return future

    def settle(self, line: bytes) -> None:
        """Deliver a response. Raises ValueError, LookupError, TypeError or RecursionError if it is invalid."""
        message = json.loads(line)
        outcome = message["result"] if "result" in message else RequestFailed(*map(str, message["error"]))
        with self._lock:
            future = self._futures.pop(message["id"])
        if isinstance(outcome, RequestFailed):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def fail(self, error: ProcessExited) -> None:
        """Fail all requests, also future ones."""
        with self._lock:
            self._error, futures = error, list(self._futures.values())
            self._futures.clear()
        for future in futures:
            future.set_exception(error)


def _write(process: subprocess.Popen[bytes], requests: queue.SimpleQueue[bytes]) -> None:
    """Write requests until the empty one; then close the child's stdin."""
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as pipe:  # OSError: the child has exited
        while line := requests.get():
            pipe.write(line)
            pipe.flush()


def _read(
    process: subprocess.Popen[bytes], responses: _Responses, session: bool, stderr: threading.Thread, tail: bytearray
) -> None:
    """Deliver responses until the child exits or violates the protocol; then fail the remaining requests.

    stderr, tail: thread that collects the child's stderr, and its result."""
    assert process.stdout is not None
    code: int = -signal.SIGKILL
    try:
        with contextlib.suppress(Exception), process.stdout as pipe:  # an invalid response, or no memory for it
            while line := pipe.readline(MAX_RESPONSE):
                responses.settle(line)
            deadline = time.monotonic() + EXIT
            while not _exited(process) and time.monotonic() < deadline:
                time.sleep(EXIT_POLL)
        _kill(process, session)
        code = process.wait()
        stderr.join(EXIT)  # longer only if a process that the child started holds its stderr
    finally:
        responses.fail(ProcessExited(code, bytes(tail).decode(errors="replace").strip()))


def _collect(pipe: IO[bytes] | None, tail: bytearray) -> None:
    """Read a pipe to its end; keep its last bytes."""
    if pipe is not None:
        with pipe:
            while chunk := os.read(pipe.fileno(), 2**16):
                tail += chunk
                del tail[:-STDERR_TAIL]


def _start_thread(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True, name="json-process")
    thread.start()
    return thread


def _exited(process: subprocess.Popen[bytes]) -> bool:
    """Return True if the child has exited. It is not reaped, so that `_kill` can still use its id."""
    try:
        return process.returncode is not None or psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _kill(process: subprocess.Popen[bytes], session: bool) -> None:
    """Kill the child and, in a session, what it has left; does nothing once the child is reaped."""
    if not session:
        process.kill()
    elif process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only the exited child is left
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes], requests: queue.SimpleQueue[bytes], session: bool) -> None:
    _kill(process, session)
    requests.put(b"")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT)
