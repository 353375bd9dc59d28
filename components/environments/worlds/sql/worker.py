"""Execution of queries in a child process, which `database.py` starts.

It runs untrusted SQL, so its privileges are minimal: only the standard library, no environment variables, no writable
files, and a memory limit. SQLite's `hard_heap_limit` applies per process, so queries cannot run in the main process.
Bytes of a result are `{"hex": ...}`. Each query opens a new connection, so queries share no state.
"""

from __future__ import annotations

import functools
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

INSTRUCTIONS = 5_000_000
"""Maximum number of instructions of SQLite's virtual machine per query."""
SECONDS = 10.0
"""Time limit of a query in seconds, for cases that the instruction limit does not stop."""
LENGTH = 4_000
"""Maximum number of characters of a query, and of bytes of any value in it."""
HEAP_MB = 64
"""Memory limit of SQLite in MB."""
PROCESS_MB = 256
"""Address space limit of this process in MB."""
RESULT_BYTES = 1 << 20
"""Maximum size of all values of a result in bytes."""
_EVERY = 500
"""Instructions between two calls of the progress handler."""

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION}
_FORBIDDEN_FUNCTIONS = {
    "load_extension",
    "random",
    "randomblob",
    "current_date",
    "current_time",
    "current_timestamp",
    "fts3_tokenizer",
    "readfile",
    "writefile",
    "edit",
    "sqlite_version",
    "sqlite_source_id",
    "sqlite_compileoption_get",
    "sqlite_compileoption_used",
}
_DATE_FUNCTIONS = {"date": 0, "time": 0, "datetime": 0, "julianday": 0, "unixepoch": 0, "strftime": 1, "timediff": 1}
"""Date functions, with the number of arguments with which they default to the current time."""
_CLOCK_WORDS = {"now", "localtime", "utc"}
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: LENGTH,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: LENGTH,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


class QueryError(Exception):
    """Failed query. The agent reads the message."""


class Connection:
    """Read-only connection for one query."""

    def __init__(self, path: str):
        self._sqlite = sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True)
        self._sqlite.execute(f"PRAGMA hard_heap_limit = {HEAP_MB << 20}")
        self._sqlite.execute("PRAGMA query_only = ON")
        self._sqlite.execute("PRAGMA temp_store = MEMORY")
        self._sqlite.execute("PRAGMA trusted_schema = OFF")
        self._sqlite.text_factory = lambda data: data.decode(errors="replace")
        self._dates = sqlite3.connect(":memory:")
        available = {name for (name,) in self._dates.execute("SELECT name FROM pragma_function_list")}
        for name in _DATE_FUNCTIONS.keys() & available:
            self._sqlite.create_function(name, -1, functools.partial(self._date, name), deterministic=True)
        for limit, value in _LIMITS.items():
            self._sqlite.setlimit(limit, value)
        self._sqlite.set_authorizer(_authorize)
        self._sqlite.set_progress_handler(self._progress, _EVERY)

    def close(self) -> None:
        self._sqlite.close()
        self._dates.close()

    def query(self, sql: str, rows: int) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return the names of the columns and at most `rows` rows. Raise QueryError if the query fails."""
        if len(sql) > LENGTH:
            raise QueryError(f"the query has {len(sql)} characters; {LENGTH} at most")
        self._calls_left, self._deadline = INSTRUCTIONS // _EVERY, time.monotonic() + SECONDS
        try:
            with closing(self._sqlite.execute(sql)) as cursor:
                if cursor.description is None:
                    raise QueryError("this is no query; only SELECT is allowed")
                return [name for name, *_ in cursor.description], _fetch(cursor, rows)
        except MemoryError:
            raise QueryError(f"the query needs more memory than {HEAP_MB} MB and was ended") from None
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            text = str(error)
            if "interrupted" in text:
                raise QueryError("the query took too long and was ended") from None
            if "out of memory" in text:
                raise QueryError(f"the query needs more memory than {HEAP_MB} MB and was ended") from None
            if "not authorized" in text or "prohibited" in text or "authorization" in text:
                raise QueryError(f"{text}: only SELECT is allowed, without functions of time or chance") from None
            if "user-defined function" in text:
                raise QueryError("functions of dates take written dates, not now, and know no time zone") from None
            if isinstance(error, UnicodeError):
                raise QueryError("the query is no valid text") from None
            raise QueryError(text) from None

    def _date(self, name: str, *arguments: Any) -> Any:
        """Call SQLite's own function. Raise ValueError if it would read the clock or the time zone."""
        texts = [value.decode(errors="replace") if isinstance(value, bytes) else value for value in arguments]
        words = {value.partition("\0")[0].strip().lower() for value in texts if isinstance(value, str)}
        if len(arguments) <= _DATE_FUNCTIONS[name] or words & _CLOCK_WORDS:
            raise ValueError
        return self._dates.execute(f"SELECT {name}({', '.join('?' * len(arguments))})", arguments).fetchone()[0]

    def _progress(self) -> bool:
        """Return True to interrupt the query."""
        self._calls_left -= 1
        return self._calls_left <= 0 or time.monotonic() > self._deadline


def _authorize(action: int, first: str | None, second: str | None, database: str | None, inner: str | None) -> int:
    if action not in _ALLOWED or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FORBIDDEN_FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _fetch(cursor: sqlite3.Cursor, limit: int) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    size = 0
    while len(rows) < limit and (row := cursor.fetchone()) is not None:
        size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if size > RESULT_BYTES:
            raise QueryError(f"the result has more than {RESULT_BYTES} bytes; ask for fewer rows or shorter values")
        rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def query(path: str, sql: str, rows: int) -> dict[str, Any]:
    """Return the columns and rows of a query. Raises QueryError."""
    with closing(Connection(path)) as connection:
        columns, values = connection.query(sql, rows)
    return {"columns": columns, "rows": [[_plain(value) for value in row] for row in values]}
