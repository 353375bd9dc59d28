"""Rows of JSON Lines, an object or a text in each line, of JSON files: an array, an object with an array of rows, or
objects one after the other, and of text files: a text in each line. A text is a row with the column `prompt`.

A JSON file is parsed as a stream. The nesting depth and the size of a row are limited, so a hostile file exhausts
neither memory nor the stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from components.data.files import DataFile, reading
from components.data.rows import ROW_BYTES, ROW_VALUES, BrokenRow, DataRow, OnBroken, too_large
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
                values = _parsed(line, stream, file.format)
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


TEXT_COLUMN = "prompt"
"""Column of a row that is a text."""


def columns_of(value: Any) -> dict[str, Any]:
    """Return the columns of a row: an object, or a text. Raises ValueError for another value."""
    if isinstance(value, str):
        return {TEXT_COLUMN: value}
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got a {type(value).__name__}")
    return value


def _parsed(line: bytes, stream: IO[bytes], format: str) -> dict[str, Any] | None:
    """Return the columns of a line, None for an empty line. Raises ValueError. stream: what follows the line."""
    import orjson

    if len(line) > ROW_BYTES:
        raise too_large(len(line) + _skipped(line, stream))
    if not line.strip():
        return None
    if format == "text":
        try:
            return columns_of(line.decode().rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise ValueError(_invalid_json(line, error)) from None
    if len(line) > ROW_VALUES and (count := count_values(line)) > ROW_VALUES:
        raise too_large(count, "values")
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(_invalid_json(line, error)) from None
    return columns_of(values)


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


ROW_KEYS = ("data", "rows", "examples", "items", "instances", "records", "train", "test", "validation", "resourceSpans")
"""Keys under which an object holds its array of rows."""
DEEPEST = 200
"""Maximum nesting depth."""
_BLOCK = 1 << 16
"""Bytes that are parsed at a time."""


class InvalidJSON(ValueError):
    """JSON text that is invalid, truncated, nested too deeply, or holds no rows."""


class _RowWindow:
    """Stream that ends with RowTooLarge when a row does, because the parser keeps a row, or a text, until its end."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        self._size = 0

    def read(self, size: int) -> bytes:
        if self._size > ROW_BYTES + _BLOCK:  # a row begins within a block
            raise too_large(self._size, at_least=True)
        block = self._stream.read(size)
        self._size += len(block)
        return block

    def end_row(self) -> None:
        """Begin to count the size of the next row."""
        self._size = 0


def json_rows(stream: IO[bytes]) -> Iterator[Any]:
    """Yield the rows of a JSON file, with one in memory at a time. An object that has no array of rows is a row, and
    others may follow it, as ConsoleSpanExporter prints them. Raises InvalidJSON, and RowTooLarge for a row that exceeds
    a limit, also after rows that were valid."""
    import ijson
    from ijson.common import ObjectBuilder

    start: int | None = None  # nesting depth of the rows
    depth, key, builder, values = 0, "", None, 0
    window = _RowWindow(stream)
    whole = ObjectBuilder()
    try:
        for event, value in ijson.basic_parse(window, buf_size=_BLOCK, use_float=True, multiple_values=True):
            closing = event in ("end_map", "end_array")
            depth -= closing
            values += not closing and event != "map_key"
            if values > ROW_VALUES:
                raise too_large(values, "values", at_least=True)
            if builder is None and start is None:
                if (event == "start_array") and (depth == 0 or (depth == 1 and key in ROW_KEYS)):
                    start = depth + 1
                elif depth == 0 and event != "start_map" and not closing:
                    raise InvalidJSON("expected an array of rows, or an object with one")
                else:
                    key = value if event == "map_key" and depth == 1 else key
                    whole.event(event, value)
                    if depth == 0 and closing:
                        yield whole.value
                        whole, values = ObjectBuilder(), 0
                        window.end_row()
            elif start == 1 and depth == 0 and not closing:
                raise InvalidJSON("there is text behind the array of rows")
            elif start is not None and depth >= start:
                builder = builder or ObjectBuilder()
                builder.event(event, value)
                if depth == start and event not in ("start_map", "start_array", "map_key"):
                    yield builder.value
                    builder, values = None, 0
                    window.end_row()
            elif start is not None and closing and depth == start - 1:
                if depth == 0:
                    continue
                return  # the rest of the object describes the rows
            depth += event in ("start_map", "start_array")
            if depth > DEEPEST:
                raise InvalidJSON(f"nested more than {DEEPEST} levels deep")
    except ijson.JSONError as error:
        first_line = str(error).strip().splitlines()[0]
        raise InvalidJSON(f"invalid JSON: {first_line}") from None
