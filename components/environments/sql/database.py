"""Databases that can only be read, by queries that a model wrote.

Each is a real SQLite file, opened with `mode=ro`. An authorizer allows reading and nothing else: no writing, no PRAGMA,
no ATTACH, no extensions, and no functions that would answer differently on another day; those of dates are SQLite's
own, but refuse `now` and the machine's time zone. A query may take so many instructions of SQLite's machine, which are
counted, so that it ends alike on every computer; a clock stops what the count does not. Texts and rows are bounded.
"""

from __future__ import annotations

import functools
import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from components.environments.sql.schemas import Schema
from components.environments.tools import Invalid

INSTRUCTIONS = 5_000_000
SECONDS = 10.0
LONGEST = 4_000
"""Characters of a query, and bytes of any text in the database's hands."""
_EVERY = 500
"""Instructions between two looks at the count."""

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION}
_NO_FUNCTIONS = {
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
_OF_DATES = {"date": 0, "time": 0, "datetime": 0, "julianday": 0, "unixepoch": 0, "strftime": 1, "timediff": 1}
"""Functions of dates, and how many arguments they take before they say that they mean now."""
_NOT_TODAY = {"now", "localtime", "utc"}
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: LONGEST,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: LONGEST,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


def write(path: Path, schema: Schema, seed: str) -> None:
    """Makes a database of this schema."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(schema.tables)
        for table, rows in schema.rows(random.Random(seed)).items():
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


class Database:
    """An open database, for reading."""

    def __init__(self, path: Path):
        self._connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False)
        self._connection.execute("PRAGMA query_only = ON")
        self._connection.execute("PRAGMA temp_store = MEMORY")
        self._connection.execute("PRAGMA trusted_schema = OFF")
        self._connection.text_factory = lambda data: data.decode(errors="replace")
        self._dates = sqlite3.connect(":memory:", check_same_thread=False)
        known = {name for (name,) in self._dates.execute("SELECT name FROM pragma_function_list")}
        for name, least in _OF_DATES.items():
            if name not in known:  # of a later SQLite
                continue
            self._connection.create_function(name, -1, functools.partial(self._dated, name, least), deterministic=True)
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.set_authorizer(_authorized)
        self._connection.set_progress_handler(self._looked, _EVERY)

    def close(self) -> None:
        self._connection.close()
        self._dates.close()

    def query(self, sql: str, most: int) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Names of the columns, and up to so many rows. Raises Invalid."""
        if len(sql) > LONGEST:
            raise Invalid(f"the query has {len(sql)} characters; {LONGEST} at most")
        self._looks, self._until = INSTRUCTIONS // _EVERY, time.monotonic() + SECONDS
        try:
            with closing(self._connection.execute(sql)) as cursor:
                if cursor.description is None:
                    raise Invalid("this is no query; only SELECT is allowed")
                return [name for name, *_ in cursor.description], cursor.fetchmany(most)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            text = str(error)
            if "interrupted" in text:
                raise Invalid("the query took too long and was ended") from None
            if "not authorized" in text or "prohibited" in text or "authorization" in text:
                raise Invalid(f"{text}: only SELECT is allowed, without functions of time or chance") from None
            if "user-defined function" in text:
                raise Invalid("functions of dates take written dates, not now, and know no time zone") from None
            if isinstance(error, UnicodeError):
                raise Invalid("the query is no valid text") from None
            raise Invalid(text) from None

    def _dated(self, name: str, least: int, *given: Any) -> Any:
        """SQLite's own function, where it does not ask for the clock or the zone; else ValueError."""
        texts = [one.decode(errors="replace") if isinstance(one, bytes) else one for one in given]
        words = {one.partition("\0")[0].strip().lower() for one in texts if isinstance(one, str)}
        if len(given) <= least or words & _NOT_TODAY:
            raise ValueError
        return self._dates.execute(f"SELECT {name}({', '.join('?' * len(given))})", given).fetchone()[0]

    def _looked(self) -> bool:
        """Ends the query where it is true."""
        self._looks -= 1
        return self._looks <= 0 or time.monotonic() > self._until


def _authorized(action: int, first: str | None, second: str | None, database: str | None, inner: str | None) -> int:
    if action not in _ALLOWED or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _NO_FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK
