"""Rows of JSON Lines: an object in each line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from components.data.files import DataFile, reading
from components.data.limits import ROW_BYTES, ROW_VALUES, too_large
from components.data.rows import BrokenRow, DataRow, OnBroken
from components.strict_json import count_values

DETECTED_FROM = 4 << 20
"""Bytes at the beginning of a file that its form is recognised from."""


def line_rows(file: DataFile, on_broken: OnBroken) -> Iterator[DataRow]:
    """Yield the rows of a file, numbered by their lines."""
    with file.open() as stream, reading(file.uri):
        number = 0
        while line := stream.readline(ROW_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            try:
                values = _parsed(line, stream)
            except ValueError as error:
                on_broken(BrokenRow(number, file.uri, str(error)))
                continue
            if values is not None:
                yield DataRow(number, file.uri, values)


def holds_lines(file: DataFile) -> bool:
    """Return True if a file named `.json` holds JSON Lines: its first line is an object, and others follow."""
    import orjson

    with file.open() as stream, reading(file.uri):
        line = stream.readline(DETECTED_FROM)
        first, size = line.removeprefix(b"\xef\xbb\xbf").strip(), len(line)
        if not first.startswith(b"{"):
            return False
        while size < DETECTED_FROM and (line := stream.readline(DETECTED_FROM - size)):
            size += len(line)
            if line.strip():
                break
        else:
            return False
    try:
        return count_values(first) <= ROW_VALUES and isinstance(orjson.loads(first), dict)
    except orjson.JSONDecodeError:
        return False


def not_an_object(value: Any) -> str:
    """Return the problem of a row that is no object."""
    return f"expected a JSON object, got a {type(value).__name__}"


def _parsed(line: bytes, stream: IO[bytes]) -> dict[str, Any] | None:
    """Return the object of a line, None for an empty line. Raises ValueError. stream: what follows the line."""
    import orjson

    if len(line) > ROW_BYTES:
        raise too_large(len(line) + _skipped(line, stream))
    if not line.strip():
        return None
    if len(line) > ROW_VALUES and (count := count_values(line)) > ROW_VALUES:
        raise too_large(count, "values")
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(_invalid_json(line, error)) from None
    if not isinstance(values, dict):
        raise ValueError(not_an_object(values))
    return values


def _skipped(line: bytes, stream: IO[bytes]) -> int:
    """Read the rest of a line, and return its size."""
    size = 0
    while line and not line.endswith(b"\n"):
        line = stream.readline(ROW_BYTES)
        size += len(line)
    return size


def _invalid_json(line: bytes, error: ValueError) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as undecoded:
        return f"the text is not UTF-8: byte 0x{line[undecoded.start]:02x} at position {undecoded.start}"
    return f"invalid JSON: {error}"
