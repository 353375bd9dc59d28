"""Read-only databases for untrusted queries, which a model writes.

Each database is a SQLite file. A query runs in a subprocess (`worker.py`), which opens the file with `mode=ro` under an
authorizer that allows only reads: no writes, no PRAGMA, no ATTACH, no extensions, and no functions whose result depends
on the time. The number of instructions of SQLite's virtual machine is limited, so the limit is the same on every
machine; a time limit covers the remaining cases. Memory, values, rows and results are limited as well. A query that
exceeds a limit returns an error to the agent and does not affect other episodes.

A small pool of worker processes serves all databases. Each worker runs one query at a time; a worker that does not
respond is killed and replaced.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import select
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from components.environments.tools import Invalid
from components.environments.worlds.sql import worker
from components.environments.worlds.sql.schemas import Schema
from components.errors import EnvironmentFailed

PROCESSES = max(1, min(4, os.cpu_count() or 1))
"""Maximum number of concurrent queries."""
GRACE = 2.0
"""Seconds beyond a query's time limit after which its worker is killed: a single SQL function may take that long."""
START = 60.0
"""Time limit for the start of a worker, in seconds."""
_STOP_INTERVAL = 0.1
"""Seconds between two checks of the stop event."""
_ANSWER_BYTES = 16 << 20
"""Maximum size of a response in bytes; `worker.RESULT_BYTES`, serialized as JSON, is less."""


def write(path: Path, schema: Schema, seed: str) -> None:
    """Create a database with this schema and data generated from `seed`."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(schema.tables)
        for table, rows in schema.rows(random.Random(seed)).items():
            placeholders = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {table} VALUES ({placeholders})", rows)


class Database:
    """Read-only database file."""

    def __init__(self, path: Path):
        self.path = path

    def query(
        self, sql: str, limit: int, stop: threading.Event | None = None
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return the names of the columns and at most `limit` rows. stop: event that aborts the query.

        Raises Invalid with the reason if the query fails, EnvironmentFailed if no worker can be started.
        """
        if len(sql) > worker.LENGTH:
            raise Invalid(f"the query has {len(sql)} characters; {worker.LENGTH} at most")
        request = {"path": str(self.path), "sql": sql, "rows": limit}
        answer = _processes.ask(json.dumps(request).encode() + b"\n", stop)
        if "error" in answer:
            raise Invalid(answer["error"])
        rows = [
            tuple(bytes.fromhex(cell["hex"]) if isinstance(cell, dict) else cell for cell in row)
            for row in answer["rows"]
        ]
        return answer["columns"], rows


class _Processes:
    """Pool of worker processes. Idle workers are reused; a new one starts if none is idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._slots = threading.BoundedSemaphore(PROCESSES)
        self.threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="sql")
        """Threads that wait for responses."""
        atexit.register(self.close)

    def ask(self, request: bytes, stop: threading.Event | None) -> dict[str, Any]:
        with self._slots:
            process = self._idle_process() or self._start()
            answer: bytes | None = None
            try:
                answer, reason = _exchange(process, request, stop, worker.SECONDS + GRACE)
            finally:
                if answer is None:
                    _terminate(process)
            if answer is None:
                return {"error": reason}
            with self._lock:
                self._idle.append(process)
        return json.loads(answer)

    def _idle_process(self) -> subprocess.Popen[bytes] | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                process = self._idle.pop()
            if process.poll() is None:
                return process
            _terminate(process)

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                bufsize=0,
            )
        except OSError as error:
            raise EnvironmentFailed(f"cannot start the SQL worker process: {error}") from error
        ready, reason = _exchange(process, b"", None, START)
        if ready is None:
            _terminate(process)
            raise EnvironmentFailed(f"the SQL worker process was not ready within {START:g} s: {reason}")
        return process

    def close(self) -> None:
        with self._lock:
            processes, self._idle = self._idle, []
        for process in processes:
            _terminate(process)


def _exchange(
    process: subprocess.Popen[bytes], request: bytes, stop: threading.Event | None, seconds: float
) -> tuple[bytes | None, str]:
    """Send a request and return the response line; or None and the reason of the failure."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    received = bytearray()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    process_error = (
        f"the query ended its process; it needs more than {worker.PROCESS_MB} MB of memory, or SQLite failed"
    )
    try:
        process.stdin.write(request)  # a few kilobytes: fits in the pipe's buffer
        while not received.endswith(b"\n"):
            if stop is not None and stop.is_set():
                return None, "the episode was stopped"
            if time.monotonic() > deadline:
                return None, "the query took too long and was ended"
            if poll.poll(_STOP_INTERVAL * 1000):
                part = os.read(process.stdout.fileno(), 1 << 16)
                received += part
                if not part or len(received) > _ANSWER_BYTES:
                    return None, process_error
    except OSError:
        return None, process_error
    return bytes(received), ""


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    process.wait()


_processes = _Processes()
threads = _processes.threads
