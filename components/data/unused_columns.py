"""Columns that a form does not read, and the search for labels among them.

A label that is not read makes bad answers look like good ones, so a column is suspected if it has the name of a label,
is true or false, or has two values. Memory is bounded: some values of some columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from components.data.forms.thumbs import LABEL_COLUMNS, LABELS

MOST_COLUMNS = 1000
"""Maximum number of columns that are counted."""
_LONGEST = 80
_BOOLEAN = {"true", "false"}


@dataclass(slots=True)
class UnusedColumn:
    """Content of one column."""

    name: str
    example: Mapping[str, Any]
    """First row that has a value."""
    count: int = 0
    """Rows that have a value."""
    values: set[str] = field(default_factory=set)
    """First distinct values as text in lower case, at most three; a list or an object counts as three."""

    def add(self, value: Any) -> None:
        """Count a value."""
        self.count += 1
        if isinstance(value, list | dict):
            self.values |= {"list", "of", "values"}
        elif len(self.values) < 3:
            self.values.add(str(value).strip().lower()[:_LONGEST])

    def suspected(self, rows: int) -> bool:
        """Return True if the column may be a label. rows: rows with and without a value."""
        if self.name.lower() in LABEL_COLUMNS or self.values <= _BOOLEAN:
            return True
        if len(self.values) == 1:
            return self.count < rows and self.values <= LABELS.keys()
        return len(self.values) == 2 and self.count > 2

    def __str__(self) -> str:
        values = " and ".join(map(repr, sorted(self.values))) if len(self.values) < 3 else "more than two values"
        return f"{self.name!r} ({values})"


class UnusedColumns:
    """Columns of the rows of one import that its form does not read."""

    def __init__(self) -> None:
        self._columns: dict[str, UnusedColumn] = {}
        self._rows = 0

    def add(self, row: Mapping[str, Any], unread: Mapping[str, Any]) -> None:
        """Count a row. unread: its columns that were not read; empty text is no value."""
        self._rows += 1
        for name, value in unread.items():
            if value == "" or (name not in self._columns and len(self._columns) >= MOST_COLUMNS):
                continue
            self._columns.setdefault(name, UnusedColumn(name, row)).add(value)

    def counts(self) -> dict[str, int]:
        """Return the number of rows with a value by column."""
        return {name: column.count for name, column in self._columns.items()}

    def suspected(self) -> Iterator[UnusedColumn]:
        """Yield the columns that may be labels."""
        return (column for column in self._columns.values() if column.suspected(self._rows))
