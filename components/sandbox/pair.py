"""A program and its test in two sandboxes, connected here.

    with Program(sandbox, code) as program:
        program.value_of("add(3, 4)")               # "7", as JSON
        program.verdict("assert add(3, 4) == 7")    # Verdict(passed=True)

Both processes run `components/sandbox/remote.py`. They share nothing: neither sees the other's files, memory or
processes, and each talks only to this module, by the socket of `components.sandbox.calls`, in turns: a request of the
test, then the answer of the program. Messages of the program are passed on unread, up to a largest size.

Each side has the limits of the sandbox for itself; waiting for the other does not count. Since at any time one of the
two computes, and is killed when its time is up, nothing waits for ever. Where a sandbox does not start, OSError is
raised; anything that the program does ends as a result.
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
from components.sandbox.limits import Result

EARLY = "the program ended before the test was over"
LARGEST_VALUE = 1_000_000
"""Bytes of an answer that is read here."""


@dataclass(frozen=True)
class Verdict:
    """The result of a test."""

    passed: bool
    reason: str = ""
    """Why it failed."""
    invalid: bool = False
    """Whether the test itself cannot be run, whatever the program."""


class ProgramFailed(Exception):
    """The program, or the evaluation of an expression in it, raised, ended or used more than it may."""


class Program:
    """A program that has run, and answers questions about its names. Entering raises ProgramFailed if it did not run
    to its end."""

    def __init__(self, sandbox: Sandbox, code: str):
        self._sandbox = sandbox
        self._code = code
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="program")

    def __enter__(self) -> Program:
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

    def verdict(self, test: str) -> Verdict:
        """Run a test in a sandbox of its own."""
        verdicts: list[list[Any]] = []

        def asked(message: bytes) -> bytes:
            if message.startswith(b'["verdict"'):
                verdicts.append(json.loads(message)[1:])
                return b"true"
            self._requests.put(message)
            return self._answer()

        stdin = json.dumps({"test": test})
        result = self._sandbox.python(_script(), stdin=stdin, answer=_messages(asked))
        ended = self._ended()
        if verdicts and not result.killed:
            outcome, *reasons = verdicts[0]
            reason = reasons[0] if reasons and not ended else ended
            return Verdict(outcome == "passed" and not ended, _clean(reason), outcome == "invalid")
        return Verdict(False, ended or f"the test {_how(result)}")

    def _answered(self, message: bytes) -> bytes:
        """Take an answer of the program and return the next request."""
        self._answers.put(message)
        request = self._requests.get()
        if not request:
            self._requests.put(request)  # the program may have sent more lines, which nobody reads
        return request

    def _answer(self) -> bytes:
        answer = self._answers.get()
        if not answer:
            self._answers.put(answer)  # nothing comes after it
        return answer

    def _read(self, answer: bytes, expected: str) -> str:
        """Return what an answer of the program holds. It is untrusted."""
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
        """Return why the program has ended; empty if it has not."""
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
    """Replace lone surrogates, which no file can hold."""
    return text.encode(errors="replace").decode()


def _how(result: Result) -> str:
    return f"was ended for {result.killed}" if result.killed else "ended before it was over"


def _messages(answer: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Join the lines of each message. One that is too large is taken for an empty one."""
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
