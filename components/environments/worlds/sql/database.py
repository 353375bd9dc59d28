"""Databases that can only be read, by queries that a model wrote.

Each is a real SQLite file. A query runs in a process of its own (`worker.py`), which opens the file with `mode=ro`
under an authorizer that allows reading and nothing else: no writing, no PRAGMA, no ATTACH, no extensions, and no
functions that would answer differently on another day. The number of instructions of SQLite's virtual machine is
limited, so that a query ends alike on every computer; a time limit ends what the count does not. Memory, values, rows
and results are limited, too. What a limit ends is an answer to the agent; no other episode notices.

A few processes serve all databases; each runs one query at a time, and one that does not answer is killed and replaced.
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
"""Queries that run at once."""
GRACE = 2.0
"""Seconds beyond a query's time limit after which its process is killed: one function may run that long by itself."""
START = 60.0
"""Seconds in which a process must be ready."""
_STOP_INTERVAL = 0.1
"""Seconds between two checks whether the episode was stopped."""
_ANSWER_BYTES = 16 << 20
"""Bytes of one answer; `worker.RESULT_BYTES`, written as JSON, are fewer."""


def write(path: Path, schema: Schema, seed: str) -> None:
    """Create a database of this schema."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(schema.tables)
        for table, rows in schema.rows(random.Random(seed)).items():
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


class Database:
    """A database file, for reading."""

    def __init__(self, path: Path):
        self.path = path

    def query(
        self, sql: str, most: int, stop: threading.Event | None = None
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return the names of the columns and at most `most` rows. stop: ends the query when it is set.

        Raises Invalid with the reason where there is no answer, EnvironmentFailed where no process can be started.
        """
        if len(sql) > worker.LENGTH:
            raise Invalid(f"the query has {len(sql)} characters; {worker.LENGTH} at most")
        request = {"path": str(self.path), "sql": sql, "rows": most}
        answer = _processes.ask(json.dumps(request).encode() + b"\n", stop)
        if "error" in answer:
            raise Invalid(answer["error"])
        rows = [
            tuple(bytes.fromhex(cell["hex"]) if isinstance(cell, dict) else cell for cell in row)
            for row in answer["rows"]
        ]
        return answer["columns"], rows


class _Processes:
    """Processes that run queries: idle ones are kept, and started where there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._places = threading.BoundedSemaphore(PROCESSES)
        self.threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="sql")
        """Threads that wait for queries."""
        atexit.register(self.close)

    def ask(self, request: bytes, stop: threading.Event | None) -> dict[str, Any]:
        with self._places:
            process = self._idle_process() or self._start()
            answer: bytes | None = None
            try:
                answer, reason = _exchange(process, request, stop, worker.SECONDS + GRACE)
            finally:
                if answer is None:
                    _end(process)
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
            _end(process)

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
            raise EnvironmentFailed(f"the process that runs queries was not started: {error}") from error
        ready, reason = _exchange(process, b"", None, START)
        if ready is None:
            _end(process)
            raise EnvironmentFailed(f"the process that runs queries was not ready within {START:g} s: {reason}")
        return process

    def close(self) -> None:
        with self._lock:
            processes, self._idle = self._idle, []
        for process in processes:
            _end(process)


def _exchange(
    process: subprocess.Popen[bytes], request: bytes, stop: threading.Event | None, seconds: float
) -> tuple[bytes | None, str]:
    """Return the line that answers a request; or None, and why there is none."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    received = bytearray()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    died = f"the query ended its process; it needs more than {worker.PROCESS_MB} MB of memory, or SQLite failed"
    try:
        process.stdin.write(request)  # a few kilobytes: less than the pipe holds
        while not received.endswith(b"\n"):
            if stop is not None and stop.is_set():
                return None, "the episode was stopped"
            if time.monotonic() > deadline:
                return None, "the query took too long and was ended"
            if poll.poll(_STOP_INTERVAL * 1000):
                part = os.read(process.stdout.fileno(), 1 << 16)
                received += part
                if not part or len(received) > _ANSWER_BYTES:
                    return None, died
    except OSError:
        return None, died
    return bytes(received), ""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    process.wait()


_processes = _Processes()
threads = _processes.threads
