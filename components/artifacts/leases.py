"""Locks between machines: an object in the remote store that its holder keeps fresh.

The lock is created only where there is none, so of two machines that ask at once one gets it. Its holder writes it
again every few seconds. One that was not written for `times.stale` seconds belongs to the dead and is taken over; its
age is measured between two dates that the store itself gave, so no machine's clock matters. A holder that was
suspended for so long finds somebody else's name and lets go; it may finish what it does, for the first commit stays.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from components.artifacts.files import RemoteFiles
from components.artifacts.locks import Waiting, name_holder
from components.artifacts.times import Times
from components.errors import ResourceError
from components.json_text import parse_json

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def lease(
    files: RemoteFiles,
    name: str,
    what: str,
    owner: str,
    timeout: float,
    on_wait: Callable[[str], None] | None,
    times: Times,
) -> Iterator[None]:
    """Holds the lock `name` against other machines.

    what: for messages. owner: whoever holds the lock under the same owner is known to be dead; empty for nobody.
    `on_wait` is told once whom we wait for; WaitTimeout says it after `timeout` seconds. Raises ResourceError where
    the store cannot be used.
    """
    held = _Lease(files, name, owner)
    held.acquire(Waiting(what, timeout, on_wait), times)
    done = threading.Event()
    beats = threading.Thread(target=held.keep, args=(done, times.beat), name=f"lease {name}", daemon=True)
    beats.start()
    try:
        yield
    finally:
        done.set()
        beats.join(10)
        held.release()


class _Lease:
    def __init__(self, files: RemoteFiles, name: str, owner: str):
        self._files = files
        self._calm = files.impatient()
        self._name = name
        self._owner = owner
        self._token = uuid.uuid4().hex
        self._start = time.monotonic()

    def acquire(self, waiting: Waiting, times: Times) -> None:
        clock = f"{self._name}.{self._token}"
        looked = False
        try:
            while not self._files.create(self._name, self._body()):
                seen = self._files.state(self._name)
                other = self._read(self._files)
                if seen is None or other is None:  # it was let go meanwhile
                    continue
                if other.get("token") == self._token:  # our own: the answer to an earlier try was lost
                    break
                looked = True
                age = (self._now(clock) - seen.modified).total_seconds()
                dead = bool(self._owner) and other.get("owner") == self._owner
                if dead or age > times.stale:
                    if self._files.replace(self._name, self._body(), seen):
                        logger.warning("the lock of %s was taken over %.0f s after its last sign", _who(other), age)
                        break
                    continue
                waiting.pause(functools.partial(_who, other), times.poll)
        finally:
            if looked:
                with contextlib.suppress(ResourceError):
                    self._calm.delete(clock)
        self._start = time.monotonic()

    def keep(self, done: threading.Event, beat: float) -> None:
        """Writes the lock again and again, until `done` or until it is somebody else's."""
        while not done.wait(beat):
            try:
                seen = self._calm.state(self._name)
                ours = (self._read(self._calm) or {}).get("token") == self._token
                if seen is None or not ours:
                    logger.warning("%s/%s is held by another machine now", self._calm.uri, self._name)
                    return
                self._calm.replace(self._name, self._body(), seen)
            except ResourceError as error:
                logger.warning("no sign of life this time: %s", error)

    def release(self) -> None:
        try:
            if (self._read(self._calm) or {}).get("token") == self._token:
                self._calm.delete(self._name)
        except ResourceError as error:
            logger.warning("a lock is left behind, and will count as dead: %s", error)

    def _body(self) -> bytes:
        seconds = round(time.monotonic() - self._start)
        body = {"token": self._token, "owner": self._owner, "pid": os.getpid(), "host": socket.gethostname()}
        return json.dumps({**body, "seconds": seconds, "written": time.time()}).encode()

    def _read(self, files: RemoteFiles) -> dict[str, Any] | None:
        text = files.read(self._name)
        if text is None:
            return None
        try:
            body = parse_json(text)
        except ValueError:
            body = {}
        return body if isinstance(body, dict) else {}

    def _now(self, clock: str) -> datetime:
        """The store's own time: the date of something written a moment ago."""
        self._files.write(clock, b"")
        state = self._files.state(clock)
        assert state is not None, f"{clock} vanished"
        return state.modified


def _who(body: dict[str, Any]) -> str:
    return name_holder(body, body.get("seconds")) or "another machine"
