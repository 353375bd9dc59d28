"""On-disk cache of judge answers, content-addressed by model, messages and parameters.

Valid answers are not requested again by any run or stage. The same file records which batch contains which question
while the batch is under way. It is one SQLite file, shared between processes.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from components.errors import ResourceError

FILE = "answers.sqlite"
PATIENCE = 60.0
"""Seconds to wait for a lock of another process."""
TABLES = (
    "CREATE TABLE IF NOT EXISTS answers (asked TEXT PRIMARY KEY, answer BLOB) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS sent (question TEXT PRIMARY KEY, batch TEXT) WITHOUT ROWID",
)


def digest(data: Any) -> str:
    """Return the SHA-256 digest of JSON data; the order of keys does not matter."""
    return hashlib.sha256(orjson.dumps(data, option=orjson.OPT_SORT_KEYS)).hexdigest()


class _Database:
    """Access to the SQLite file. The constructor and every method raise ResourceError if the file cannot be created,
    read or written."""

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._lock = threading.Lock()
        with self._readable_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self._path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
            self._enter_wal()
            self._file.execute("PRAGMA synchronous=NORMAL")
            for table in TABLES:
                self._file.execute(table)

    def _enter_wal(self) -> None:
        """Switch to write-ahead logging. SQLite applies its own timeout to every statement except this one."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self._file.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def close(self) -> None:
        self._file.close()

    def _rows(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        with self._readable_errors():
            return self._file.execute(query, values).fetchall()

    def _write(self, query: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Write all rows in one transaction."""
        with self._readable_errors(), self._lock, self._file:
            self._file.execute("BEGIN IMMEDIATE")
            self._file.executemany(query, rows)

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            hint = f"make it writable, and free space on its disk ({type(error).__name__})"
            if "locked" in str(error):
                hint = f"another process has held it for {PATIENCE:.0f} s; end that process and rerun the command"
            elif "malformed" in str(error) or "not a database" in str(error):
                hint = "move it away: its answers are then requested, and paid, again"
            raise ResourceError(f"cached answers of judges, {self._path}: {error}; {hint}") from error


class AnswerCache(_Database):
    """Cache of answers as JSON data, by digest."""

    def find(self, key: str) -> dict[str, Any] | None:
        rows = self._rows("SELECT answer FROM answers WHERE asked = ?", key)
        return orjson.loads(rows[0][0]) if rows else None

    def keep(self, answers: Mapping[str, dict[str, Any]]) -> None:
        rows = [(key, orjson.dumps(answer)) for key, answer in answers.items()]
        self._write("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)


class SentBatches(_Database):
    """Table of the batch that contains each question."""

    def of(self, question: str) -> str | None:
        rows = self._rows("SELECT batch FROM sent WHERE question = ?", question)
        return rows[0][0] if rows else None

    def questions(self, batch: str) -> list[str]:
        return [row[0] for row in self._rows("SELECT question FROM sent WHERE batch = ?", batch)]

    def note(self, batch: str, questions: Iterable[str]) -> None:
        self._write("INSERT OR REPLACE INTO sent VALUES (?, ?)", [(question, batch) for question in questions])

    def forget(self, batch: str) -> None:
        self._write("DELETE FROM sent WHERE batch = ?", [(batch,)])
