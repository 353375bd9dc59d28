"""Locks between the threads and processes of one machine (`flock`: a lock dies with its holder)."""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Callable
from typing import IO, Any

from components.errors import WaitTimeout
from components.json_text import parse_json

LIMIT = 10_000
"""Most characters that are read of a lock."""


def lock_file(file: IO[str], what: str, timeout: float, on_wait: Callable[[str], None] | None = None) -> None:
    """Locks an open file against other threads and processes, until it is closed, and writes into it who holds it.

    what: for messages. `on_wait` is told once whom we wait for; WaitTimeout says it after `timeout` seconds.
    """
    waiting = Waiting(what, timeout, on_wait)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            waiting.pause(lambda: _holder(file), 0.25)
    file.seek(0)
    file.truncate()
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}, file)
    file.flush()


class Waiting:
    """A wait for what somebody else is making: tells once for whom, and ends after `timeout` seconds."""

    def __init__(self, what: str, timeout: float, on_wait: Callable[[str], None] | None):
        self._what = what
        self._timeout = timeout
        self._on_wait = on_wait
        self._start = time.monotonic()

    def pause(self, holder: Callable[[], str], longest: float) -> None:
        """Sleeps a little, up to `longest` seconds. Raises WaitTimeout once the time is over."""
        waited = time.monotonic() - self._start
        if waited >= self._timeout:
            raise WaitTimeout(f"waited {waited:.0f} s for {self._what}, which {holder()} is making")
        if self._on_wait is not None:
            self._on_wait(f"waiting for {self._what}, which {holder()} is making")
            self._on_wait = None
        time.sleep(min(longest, 0.02 + waited / 10, max(self._timeout - waited, 0.001)))


def name_holder(body: Any, seconds: Any) -> str:
    """Name the holder of a lock from what it wrote there: somebody else may have written anything."""
    if not isinstance(body, dict) or isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return ""
    pid, host = body.get("pid"), body.get("host")
    if not isinstance(pid, int) or not isinstance(host, str) or not host.isprintable() or not math.isfinite(seconds):
        return ""
    return f"process {pid} on {host[:100]} (since {seconds:.0f} s)"


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        body = parse_json(file.read(LIMIT))
        since = body.get("since") if isinstance(body, dict) else None
        seconds = time.time() - since if isinstance(since, int | float) else None
    except (ValueError, OverflowError):  # it has the lock but has not written its name yet
        return "another process"
    return name_holder(body, seconds) or "another process"
