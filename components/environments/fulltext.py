"""Full-text search over in-memory documents with SQLite FTS5: Porter stemming, BM25 ranking.

A query may be any text: at most 32 of its words are used, never as SQLite query syntax. Documents with equal ranks keep
their input order.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from components.errors import ResourceError

WORDS = 32
"""Maximum number of query words used."""
STOP = frozenset((
    "a", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by", "can", "could", "did", "do", "does", "for",
    "from", "had", "has", "have", "how", "i", "if", "in", "into", "is", "it", "its", "me", "my", "no", "not", "of",
    "on", "or", "our", "s", "so", "than", "that", "the", "their", "them", "then", "there", "these", "they", "this",
    "to", "up", "us", "was", "we", "were", "what", "when", "where", "which", "who", "whom", "whose", "will", "with",
    "would", "you", "your",
))  # fmt: skip
"""Stop words, ignored unless the query has no other words."""


class Index:
    """A full-text index.

    Args:
        fields: BM25 weight of each field, by name.
        documents: (number, texts of the fields) for each document; the numbers are unique.
        filters: Values by document number that a search can filter on, by filter name.
    """

    def __init__(
        self,
        fields: dict[str, float],
        documents: Iterable[tuple[int, Sequence[str]]],
        filters: dict[str, dict[int, Any]] | None = None,
    ):
        filters = filters or {}
        self._rank = f"bm25(texts, {', '.join(str(weight) for weight in fields.values())})"
        self._last = len(fields) - 1
        self._lock = threading.Lock()  # one connection, shared by the threads of a server
        self._store = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._store.execute(
                f"CREATE VIRTUAL TABLE texts USING fts5({', '.join(fields)}, tokenize = 'porter unicode61')"
            )
        except sqlite3.OperationalError as error:
            raise ResourceError(
                f"the SQLite library of this Python has no full-text search: {error}; use a Python whose SQLite "
                "includes FTS5"
            ) from None
        rows: list[tuple[Any, ...]] = [(number, *texts) for number, texts in documents]
        self._store.executemany(f"INSERT INTO texts(rowid, {', '.join(fields)}) VALUES (?{', ?' * len(fields)})", rows)
        columns = "".join(f", {name}" for name in filters)
        self._store.execute(f"CREATE TABLE facts(number INTEGER PRIMARY KEY{columns})")
        self._store.executemany(
            f"INSERT INTO facts VALUES (?{', ?' * len(filters)})",
            ((row[0], *(values[row[0]] for values in filters.values())) for row in rows),
        )
        self._store.commit()

    def search(
        self, text: str, limit: int, *, where: Sequence[tuple[str, Any]] = (), snippet: int = 0
    ) -> list[tuple[int, str]]:
        """Return the best documents that contain at least one query word, best first, as (number, excerpt).

        limit: maximum number of documents. where: SQL conditions on the filters with one `?` each, and its value:
        `("day >= ?", 3)`; written by the caller, never by a model. snippet: length in words of the excerpt of the last
        field around the matches; 0 returns an empty excerpt.
        """
        words = terms(text)
        if not words:
            return []
        excerpt = f"snippet(texts, {self._last}, '', '', ' ... ', {snippet})" if snippet else "''"
        conditions = "".join(f" AND {condition}" for condition, _ in where)
        query = (
            f"SELECT texts.rowid, {excerpt} FROM texts JOIN facts ON facts.number = texts.rowid "
            f"WHERE texts MATCH ?{conditions} ORDER BY {self._rank}, texts.rowid LIMIT ?"
        )
        match = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            return list(self._store.execute(query, (match, *(value for _, value in where), limit)))


def terms(text: str) -> list[str]:
    """Return the query words of a text, deduplicated, without stop words unless there are only stop words."""
    words = list(dict.fromkeys(re.findall(r"[a-z0-9]+", text[:1000].lower())))
    return ([word for word in words if word not in STOP] or words)[:WORDS]
