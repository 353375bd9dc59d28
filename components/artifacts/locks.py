"""Locks between the threads and processes of one machine (`flock`: the lock is released when its holder dies)."""

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
"""Maximum number of characters read from a lock file."""


def lock_file(file: IO[str], resource: str, timeout: float, on_wait: Callable[[str], None] | None = None) -> None:
    """Lock an open file against other threads and processes until it is closed, and write the holder's name into it.

    resource: name of the locked resource, for messages. `on_wait` is called once with a message that names the holder;
    WaitTimeout names it after `timeout` seconds.
    """
    waiting = BoundedWait(resource, timeout, on_wait)
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


class BoundedWait:
    """Bounded wait for a resource that another process holds; reports the holder once."""

    def __init__(self, resource: str, timeout: float, on_wait: Callable[[str], None] | None):
        self._resource = resource
        self._timeout = timeout
        self._on_wait = on_wait
        self._start = time.monotonic()

    def pause(self, holder: Callable[[], str], longest: float) -> None:
        """Sleep for up to `longest` seconds. Raise WaitTimeout once the timeout has passed."""
        waited = time.monotonic() - self._start
        if waited >= self._timeout:
            raise WaitTimeout(f"timed out after {waited:.0f} s waiting for {self._resource}, locked by {holder()}")
        if self._on_wait is not None:
            self._on_wait(f"waiting for {self._resource}, locked by {holder()}")
            self._on_wait = None
        time.sleep(min(longest, 0.02 + waited / 10, max(self._timeout - waited, 0.001)))


def name_holder(body: Any, seconds: Any) -> str:
    """Return a description of a lock's holder from the lock's content; empty if the content is invalid."""
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
    except (ValueError, OverflowError):  # the holder has not written its name yet
        return "another process"
    return name_holder(body, seconds) or "another process"
