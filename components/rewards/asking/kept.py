"""Answers of judges, kept on disk by the content of what was asked: model, messages and parameters.

What was answered and understood is not asked again, whatever run or stage asks. One SQLite file; processes share it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

FILE = "answers.sqlite"
PATIENCE = 60.0
"""Seconds to wait for another process that writes."""


def digest(asked: Any) -> str:
    """Of JSON data; the order of keys has no part in it."""
    return hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).hexdigest()


class KeptAnswers:
    """JSON data by digest."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(folder / FILE, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=NORMAL")
        self._file.execute("CREATE TABLE IF NOT EXISTS answers (asked TEXT PRIMARY KEY, answer BLOB) WITHOUT ROWID")

    def find(self, asked: str) -> dict[str, Any] | None:
        row = self._file.execute("SELECT answer FROM answers WHERE asked = ?", (asked,)).fetchone()
        return None if row is None else orjson.loads(row[0])

    def keep(self, answers: Mapping[str, dict[str, Any]]) -> None:
        rows = [(asked, orjson.dumps(answer)) for asked, answer in answers.items()]
        self._file.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)

    def close(self) -> None:
        self._file.close()
