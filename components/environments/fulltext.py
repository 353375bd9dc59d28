"""Full-text search over documents in memory, by SQLite's FTS5: words are stemmed, documents are ranked by BM25.

What is searched for may be any text: only its words are used, at most 32 of them, never as SQLite's query syntax. Equal
ranks are in the order in which the documents were given.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from components.errors import ResourceError

WORDS = 32
"""Of a query that are used."""
STOP = frozenset((
    "a", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by", "can", "could", "did", "do", "does", "for",
    "from", "had", "has", "have", "how", "i", "if", "in", "into", "is", "it", "its", "me", "my", "no", "not", "of",
    "on", "or", "our", "s", "so", "than", "that", "the", "their", "them", "then", "there", "these", "they", "this",
    "to", "up", "us", "was", "we", "were", "what", "when", "where", "which", "who", "whom", "whose", "will", "with",
    "would", "you", "your",
))  # fmt: skip
"""Words that are not searched for, unless there are no others."""


class Index:
    """fields: by name, what a match in them weighs. documents: a number each, of one's own, and the text of each field.
    filters: by name, values of each document (by its number) that a search can be narrowed to."""

    def __init__(
        self,
        fields: dict[str, float],
        documents: Iterable[tuple[int, Sequence[str]]],
        filters: dict[str, dict[int, Any]] | None = None,
    ):
        filters = filters or {}
        self._rank = f"bm25(texts, {', '.join(str(weight) for weight in fields.values())})"
        self._last = len(fields) - 1
        self._lock = threading.Lock()  # one connection, asked from several threads by a server
        self._store = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._store.execute(
                f"CREATE VIRTUAL TABLE texts USING fts5({', '.join(fields)}, tokenize = 'porter unicode61')"
            )
        except sqlite3.OperationalError as error:
            raise ResourceError(
                f"the SQLite of this Python has no full-text search: {error}; take a Python whose SQLite has FTS5"
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
        """The best documents that hold at least one of the words, best first: number, and a piece of the last field of
        so many words around those found (empty for 0). where: conditions on the filters in SQL with one `?` each, and
        the value: `("day >= ?", 3)`; written by the caller, never by a model."""
        words = terms(text)
        if not words:
            return []
        piece = f"snippet(texts, {self._last}, '', '', ' ... ', {snippet})" if snippet else "''"
        conditions = "".join(f" AND {condition}" for condition, _ in where)
        query = (
            f"SELECT texts.rowid, {piece} FROM texts JOIN facts ON facts.number = texts.rowid "
            f"WHERE texts MATCH ?{conditions} ORDER BY {self._rank}, texts.rowid LIMIT ?"
        )
        match = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            return list(self._store.execute(query, (match, *(value for _, value in where), limit)))


def terms(text: str) -> list[str]:
    """The words that are searched for: each once, without those that say nothing."""
    words = list(dict.fromkeys(re.findall(r"[a-z0-9]+", text[:1000].lower())))
    return ([word for word in words if word not in STOP] or words)[:WORDS]
