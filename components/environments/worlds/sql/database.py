"""Read-only databases for untrusted queries, which a model writes.

Each database is a SQLite file. A query runs in a child process (`worker.py`), which opens the file with `mode=ro` under
an authorizer that allows only reads: no writes, no PRAGMA, no ATTACH, no extensions, and no functions whose result
depends on the time. The number of instructions of SQLite's virtual machine is limited, so the limit is the same on
every machine; a time limit covers the remaining cases. Memory, values, rows and results are limited as well. A query
that exceeds a limit returns an error to the agent and does not affect other episodes.

A small pool of processes serves all databases. Each runs one query at a time; one that does not respond is killed and
replaced.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from components.environments.tools import InvalidAction
from components.environments.worlds.sql import worker
from components.environments.worlds.sql.schemas import Schema
from components.errors import EnvironmentFailed
from components.json_process import JsonProcess, JsonProgram, ProcessExited, RequestFailed, wait_for

PROCESSES = max(1, min(4, os.cpu_count() or 1))
"""Maximum number of concurrent queries."""
GRACE = 2.0
"""Seconds beyond a query's time limit after which its process is killed: a single SQL function may take that long."""
START = 60.0
"""Time limit for the start of a process, in seconds."""
PROCESS_ERROR = f"the query ended its process; it needs more than {worker.PROCESS_MB} MB of memory, or SQLite failed"
_PROGRAM = JsonProgram(
    f"{worker.__file__}:query",
    python=(sys.executable, "-I", "-S", "-B"),
    variables={},
    limits={"RLIMIT_AS": worker.PROCESS_MB << 20, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": 32},
    folder="/",
    completes_calls=True,
)


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

        Raises InvalidAction with the reason if the query fails, EnvironmentFailed if no process can be started.
        """
        if len(sql) > worker.LENGTH:
            raise InvalidAction(f"the query has {len(sql)} characters; {worker.LENGTH} at most")
        answer = _processes.ask({"path": str(self.path), "sql": sql, "rows": limit}, stop)
        rows = [
            tuple(bytes.fromhex(cell["hex"]) if isinstance(cell, dict) else cell for cell in row)
            for row in answer["rows"]
        ]
        return answer["columns"], rows


class _Processes:
    """Pool of child processes. Idle ones are reused; a new one starts if none is idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[JsonProcess] = []
        self._slots = threading.BoundedSemaphore(PROCESSES)
        self.threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="sql")
        """Threads that wait for responses."""

    def ask(self, arguments: dict[str, Any], stop: threading.Event | None) -> dict[str, Any]:
        """Return the result of a query. Raises InvalidAction with the reason of its failure, EnvironmentFailed."""
        with self._slots:
            process = self._idle_process() or self._start()
            deadline = time.monotonic() + worker.SECONDS + GRACE

            def expired() -> str:
                if stop is not None and stop.is_set():
                    return "the episode was stopped"
                return "the query took too long and was ended" if time.monotonic() > deadline else ""

            reusable = False
            try:
                answer: dict[str, Any] = wait_for(process.request(arguments), expired)
                reusable = True
                return answer
            except TimeoutError as error:
                raise InvalidAction(str(error)) from None
            except RequestFailed as error:
                reusable = error.kind == "QueryError"
                raise InvalidAction(error.text if reusable else PROCESS_ERROR) from None
            except ProcessExited:
                raise InvalidAction(PROCESS_ERROR) from None
            finally:
                if reusable:
                    with self._lock:
                        self._idle.append(process)
                else:
                    process.kill()

    def _idle_process(self) -> JsonProcess | None:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
        return None

    def _start(self) -> JsonProcess:
        try:
            process = JsonProcess(_PROGRAM)
        except OSError as error:
            raise EnvironmentFailed(f"cannot start the SQL process: {error}") from error
        try:
            process.ready.result(START)
        except ProcessExited as error:
            raise EnvironmentFailed(f"the SQL process exited at its start: {error}") from None
        except TimeoutError:
            process.kill()
            raise EnvironmentFailed(f"the SQL process was not ready within {START:g} s") from None
        return process


_processes = _Processes()
threads = _processes.threads
