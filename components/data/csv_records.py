"""Rows of CSV and tab-separated files, whose first record names the columns."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import IO, Any

from components.data.files import DataFile, reading
from components.data.rows import ROW_BYTES, ROW_VALUES, BrokenRow, DataRow, OnBroken, RowTooLarge, too_large
from components.errors import ResourceError

_UNDECODED = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as the error handler `surrogateescape` decodes them."""


def csv_rows(file: DataFile, on_broken: OnBroken) -> Iterator[DataRow]:
    """Yield the rows of a file, numbered by the first lines of their records. Raises ResourceError without a header of
    different names."""
    with file.open() as stream, reading(file.uri):
        delimiter = "\t" if file.tab_separated else ","
        lines = _Lines(stream, delimiter)
        csv.field_size_limit(ROW_BYTES)  # of this process: `_Lines` limits records
        reader = csv.reader(lines, delimiter=delimiter)
        header = _record(reader, lines)
        if isinstance(header, str):
            raise ResourceError(str(BrokenRow(1, file.uri, header)))
        if not header:
            raise ResourceError(f"{file.uri}: expected a header with the names of the columns in the first line")
        if (twice := next((name for name in header if header.count(name) > 1), None)) is not None:
            text = f"two columns have the name {twice!r}; expected different names"
            raise ResourceError(f"{file.uri}: {text} (pandas' to_csv writes an index; index=False leaves it out)")
        while True:
            number = lines.number + 1
            record = _record(reader, lines)
            if record is None:
                return
            if isinstance(record, str):
                on_broken(BrokenRow(number, file.uri, record))
            elif len(record) == len(header):
                yield DataRow(number, file.uri, dict(zip(header, record, strict=True)))
            elif record:
                reason = f"{len(record)} fields; expected {len(header)}, as in the header"
                on_broken(BrokenRow(number, file.uri, reason))


class _Lines:
    """Lines of a table of text. The size of a record is limited line by line, before `csv` creates fields of it."""

    def __init__(self, stream: IO[bytes], delimiter: str):
        self._text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self._delimiter = delimiter
        self.number = 0
        """Number of the last line."""
        self._size = self._fields = 0
        """Bytes and fields of the record."""

    def begin_record(self) -> None:
        self._size = self._fields = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(ROW_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self._size += _bytes(line)
        if self._size > ROW_BYTES:
            part = line
            while part and not part.endswith(("\n", "\r")):
                part = self._text.readline(ROW_BYTES)
                self._size += _bytes(part)
            raise too_large(self._size)
        if self._size > ROW_VALUES:  # a smaller record has fewer fields
            self._fields += line.count(self._delimiter)
            if self._fields >= ROW_VALUES:
                raise too_large(self._fields + 1, "values")
        return line


def _bytes(line: str) -> int:
    return len(line) if line.isascii() else len(line.encode(errors="surrogateescape"))


def _record(reader: Any, lines: _Lines) -> list[str] | str | None:
    """Return the next record, the reason why it cannot be read, or None at the end."""
    lines.begin_record()
    try:
        record = next(reader, None)
    except RowTooLarge as error:
        return str(error)
    except csv.Error as error:
        return f"invalid CSV: {error}"
    if any(_UNDECODED.search(field) for field in record or ()):
        return "the text is not UTF-8"
    return record
