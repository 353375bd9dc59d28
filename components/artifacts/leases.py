"""Locks between machines: an object in the remote store that its holder keeps renewing.

The lock object is created only if it does not exist, so of two concurrent requests one succeeds. The holder rewrites it
every few seconds. A lock that was not renewed for `times.stale` seconds is considered abandoned and taken over. Its age
is the difference of two timestamps of the store, so no machine's clock matters. A holder that was suspended for that
long finds another machine's token and stops renewing; it may finish its work, because the first commit wins.
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
from components.artifacts.locks import BoundedWait, name_holder
from components.artifacts.times import Times
from components.errors import ResourceError
from components.json_text import parse_json

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def lease(
    files: RemoteFiles,
    name: str,
    resource: str,
    owner: str,
    timeout: float,
    on_wait: Callable[[str], None] | None,
    times: Times,
) -> Iterator[None]:
    """Hold the lock `name` against other machines.

    resource: name of the locked resource, for messages. owner: a lock with the same owner is known to be abandoned;
    empty for none. `on_wait` is called once with a message that names the holder; WaitTimeout names it after `timeout`
    seconds. Raises ResourceError if the store cannot be used.
    """
    lock = _Lease(files, name, owner)
    lock.acquire(BoundedWait(resource, timeout, on_wait), times)
    done = threading.Event()
    renewals = threading.Thread(target=lock.renew, args=(done, times.beat), name=f"lease {name}", daemon=True)
    renewals.start()
    try:
        yield
    finally:
        done.set()
        renewals.join(10)
        lock.release()


class _Lease:
    """Lock object in the remote store, with this machine's token."""

    def __init__(self, files: RemoteFiles, name: str, owner: str):
        self._files = files
        self._files_without_retry = files.without_retry()
        self._name = name
        self._owner = owner
        self._token = uuid.uuid4().hex
        self._start = time.monotonic()

    def acquire(self, waiting: BoundedWait, times: Times) -> None:
        """Wait for the lock and take it. Raise WaitTimeout after the timeout of `waiting`."""
        clock = f"{self._name}.{self._token}"
        clock_written = False
        try:
            while not self._files.create(self._name, self._body()):
                state = self._files.state(self._name)
                other = self._read(self._files)
                if state is None or other is None:  # it was released in the meantime
                    continue
                if other.get("token") == self._token:  # our own: the response to an earlier attempt was lost
                    break
                clock_written = True
                age = (self._now(clock) - state.modified).total_seconds()
                abandoned = bool(self._owner) and other.get("owner") == self._owner
                if abandoned or age > times.stale:
                    if self._files.replace(self._name, self._body(), state):
                        logger.warning("took over the lock of %s, last renewed %.0f s ago", _holder(other), age)
                        break
                    continue
                waiting.pause(functools.partial(_holder, other), times.poll)
        finally:
            if clock_written:
                with contextlib.suppress(ResourceError):
                    self._files_without_retry.delete(clock)
        self._start = time.monotonic()

    def renew(self, done: threading.Event, beat: float) -> None:
        """Renew the lock periodically, until `done` is set or another machine holds it."""
        while not done.wait(beat):
            try:
                state = self._files_without_retry.state(self._name)
                owned = (self._read(self._files_without_retry) or {}).get("token") == self._token
                if state is None or not owned:
                    logger.warning("%s/%s is now locked by another machine", self._files_without_retry.uri, self._name)
                    return
                self._files_without_retry.replace(self._name, self._body(), state)
            except ResourceError as error:
                logger.warning("could not renew the lock: %s", error)

    def release(self) -> None:
        try:
            if (self._read(self._files_without_retry) or {}).get("token") == self._token:
                self._files_without_retry.delete(self._name)
        except ResourceError as error:
            logger.warning("could not release the lock; it will expire: %s", error)

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
        """Return the store's own time: the timestamp of an object written just now."""
        self._files.write(clock, b"")
        state = self._files.state(clock)
        assert state is not None, f"{clock} vanished"
        return state.modified


def _holder(body: dict[str, Any]) -> str:
    return name_holder(body, body.get("seconds")) or "another machine"
