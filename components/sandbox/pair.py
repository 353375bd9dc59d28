"""A program and its test in two sandboxes, connected by the host.

    with Program(sandbox, code) as program:
        program.value_of("add(3, 4)")               # "7", as JSON
        program.verdict("assert add(3, 4) == 7")    # Verdict(passed=True)

Both processes run `components/sandbox/remote.py`. They share nothing: neither sees the other's files, memory or
processes, and each communicates only with this module, through the socket of `components.sandbox.calls`, in turns: a
request of the test, then the response of the program. Messages of the program are forwarded unread, up to a maximum
size.

Each side has the sandbox limits for itself; waiting for the other does not count. At any time one of the two computes,
and is killed when its time is up, so there is no deadlock. If a sandbox does not start, OSError is raised; anything
that the program does is reported as a result.
"""

from __future__ import annotations

import functools
import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from components.sandbox import remote
from components.sandbox.bubblewrap import Sandbox
from components.sandbox.limits import ProgramResult

EARLY = "the program ended before the test was over"
LARGEST_VALUE = 1_000_000
"""Maximum bytes of a response that is parsed here."""


@dataclass(frozen=True)
class ProgramVerdict:
    """Result of a test."""

    passed: bool
    reason: str = ""
    """Reason for the failure."""
    invalid: bool = False
    """True if the test itself cannot run, whatever the program."""


class ProgramFailed(Exception):
    """Program, or expression evaluated in it, that raised, ended or exceeded a limit."""


class SandboxedProgram:
    """Program that has run, and evaluates expressions. Entering raises ProgramFailed if it did not run to its end."""

    def __init__(self, sandbox: Sandbox, code: str):
        self._sandbox = sandbox
        self._code = code
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="program")

    def __enter__(self) -> SandboxedProgram:
        self._running = self._pool.submit(
            self._sandbox.python,
            _script(),
            stdin=json.dumps({"program": self._code}),
            stop=self._stop,
            answer=_messages(self._answered),
        )
        self._running.add_done_callback(lambda _: self._answers.put(b""))
        try:
            self._read(self._answer(), "ready")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def value_of(self, expression: str) -> str:
        """Return the value of an expression as JSON. Raises ProgramFailed."""
        self._requests.put(json.dumps(["evaluate", expression]).encode())
        return self._read(self._answer(), "json")

    def verdict(self, test: str) -> ProgramVerdict:
        """Run a test in a sandbox of its own."""
        verdicts: list[list[Any]] = []

        def forward(message: bytes) -> bytes:
            if message.startswith(b'["verdict"'):
                verdicts.append(json.loads(message)[1:])
                return b"true"
            self._requests.put(message)
            return self._answer()

        stdin = json.dumps({"test": test})
        result = self._sandbox.python(_script(), stdin=stdin, answer=_messages(forward))
        ended = self._ended()
        if verdicts and not result.killed:
            outcome, *reasons = verdicts[0]
            reason = reasons[0] if reasons and not ended else ended
            return ProgramVerdict(outcome == "passed" and not ended, _clean(reason), outcome == "invalid")
        return ProgramVerdict(False, ended or f"the test {_ending(result)}")

    def _answered(self, message: bytes) -> bytes:
        """Accept a response of the program and return the next request."""
        self._answers.put(message)
        request = self._requests.get()
        if not request:
            self._requests.put(request)  # the program may have sent more lines, which are ignored
        return request

    def _answer(self) -> bytes:
        answer = self._answers.get()
        if not answer:
            self._answers.put(answer)  # the end mark stays in the queue
        return answer

    def _read(self, answer: bytes, expected: str) -> str:
        """Return the content of an untrusted response of the program."""
        if not answer:
            raise ProgramFailed(self._ended())
        if len(answer) > LARGEST_VALUE:
            raise ProgramFailed(f"the value takes more than {LARGEST_VALUE} bytes")
        try:
            kind, *parts = json.loads(answer)
            if kind == "raised":
                kinds, _, text = parts[0]
                name = kinds[0] if isinstance(kinds[0], str) else kinds[0][1]
                raise ProgramFailed(_clean(f"it raised {name!s:.60}{': ' if text else ''}{text!s:.200}"))
            if kind == expected and all(isinstance(part, str) for part in parts):
                return "".join(parts)
        except (ValueError, TypeError, LookupError, RecursionError):
            pass
        raise ProgramFailed(EARLY)

    def _ended(self) -> str:
        """Return the reason why the program has ended; empty while it runs."""
        if not self._running.done():
            return ""
        result = self._running.result()
        return f"ended for {result.killed}" if result.killed else EARLY

    def _end(self) -> None:
        self._stop.set()
        self._requests.put(b"")
        self._pool.shutdown()
        if (error := self._running.exception()) is not None:
            raise error


def _clean(text: str) -> str:
    """Replace lone surrogates, which cannot be written to a file."""
    return text.encode(errors="replace").decode()


def _ending(result: ProgramResult) -> str:
    return f"was ended for {result.killed}" if result.killed else "ended before it was over"


def _messages(answer: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Return a function that joins the lines of each message and answers it. A message that is too large counts as
    empty."""
    parts = bytearray()
    size = 0

    def line(data: bytes) -> bytes:
        nonlocal size
        size += len(data)
        if size <= remote.LARGEST + remote.CHUNK:
            parts.extend(data[1:])
        if data.startswith(b"+"):
            return b""
        message = bytes(parts) if size <= remote.LARGEST + remote.CHUNK else b"[]"
        parts.clear()
        size = 0
        return answer(message or b"[]")

    return line


@functools.cache
def _script() -> str:
    return Path(remote.__file__).read_text()
