"""Rows of a source, readable and broken ones, and the limits of a row, which are the same for each format.

A few hundred bytes of a compressed file become gigabytes of text, and `[[],[],…]` takes 30 times its size as Python
objects. Each reader therefore counts the bytes and values of a row before it creates objects of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROW_BYTES = 8 << 20
"""Maximum size of a row in bytes: of its text, or of its values in a Parquet or Arrow file."""
ROW_VALUES = 1_000_000
"""Maximum number of values of a row, those in lists and objects included."""
DECODING_MEMORY = 200 << 20
"""Memory that the decoding of a Parquet or Arrow file may take, in bytes; for an Arrow file, its size is added."""


class RowTooLarge(ValueError):
    """Row that exceeds a limit."""


def too_large(size: int, unit: str = "bytes", *, at_least: bool = False) -> RowTooLarge:
    """Return the error of a row with `size` bytes or values. at_least: the row was not read to its end."""
    limit = ROW_BYTES if unit == "bytes" else ROW_VALUES
    return RowTooLarge(f"the row has {'at least ' if at_least else ''}{size} {unit}; expected at most {limit}")


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
