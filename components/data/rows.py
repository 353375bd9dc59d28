"""Rows of a source, readable and broken ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row of a source."""

    number: int
    """Number in its file, from 1: of the line for JSON Lines and CSV, of the row for other formats."""
    source: str
    """File, URI or dataset."""
    values: dict[str, Any]
    """JSON data by column. Text in CSV files; None for binary values."""

    @property
    def place(self) -> str:
        """Source and number, for messages."""
        return f"{self.source}:{self.number}"


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """One row that cannot be read."""

    number: int
    """Number in its file, as DataRow.number."""
    source: str
    """File or URI."""
    reason: str
    """Problem."""

    def __str__(self) -> str:
        return f"{self.source}:{self.number}: {self.reason}"


OnBroken = Callable[[BrokenRow], None]
