"""Rows of a source, as a stream: one row in memory at a time, or one batch of a Parquet file.

    rows(SourceSpec(path="train.jsonl"))               raises ResourceError at the first broken row
    rows(SourceSpec(path="train.jsonl"), on_broken)    passes broken rows to `on_broken` and continues

A broken row is a line that is not valid JSON, a value that is not an object, or a CSV record with another number of
fields than the header. A file that is damaged as a whole (a truncated JSON array, Parquet or compressed file) always
raises ResourceError.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from typing import IO, Any

from components.data.files import DataFile, data_files, digest, reading
from components.data.json_stream import InvalidJSON, json_rows
from components.data.spec import SourceSpec
from components.errors import ResourceError

LONGEST_LINE = 64 * 2**20
"""Maximum length of a line, in bytes."""
PARQUET_BATCH = 256
"""Rows of a Parquet or Arrow file that are in memory at a time."""
_START = 4096
"""Bytes at the beginning of a file that its encoding is recognised from."""
_UNDECODED = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as the error handler `surrogateescape` decodes them."""


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


def rows(spec: SourceSpec, on_broken: OnBroken | None = None) -> Iterator[DataRow]:
    """Yield the rows of a source in order, at most `spec.limit`. on_broken: called with each broken row; None raises
    ResourceError at the first. Raises ResourceError if the source cannot be read."""
    return islice(_rows(spec, on_broken or _refuse), spec.limit)


def content_digest(spec: SourceSpec) -> str:
    """Return a digest of the source's content: of the files, or of the commit of a dataset of the hub. Raises
    ResourceError if the source cannot be read."""
    if spec.dataset is not None:
        from components.data.hub import commit

        return f"{spec.dataset}@{commit(spec)}"
    return digest(data_files(spec))


def _rows(spec: SourceSpec, on_broken: OnBroken) -> Iterator[DataRow]:
    if spec.dataset is not None:
        from components.data.hub import dataset_rows

        name = "/".join(part for part in (spec.dataset, spec.config, spec.split or "train") if part)
        for number, values in enumerate(dataset_rows(spec), 1):
            yield DataRow(number, name, json_data(values))
        return
    for file in data_files(spec):
        if _has_content(file):
            yield from _READERS[file.format](file, on_broken)


def _has_content(file: DataFile) -> bool:
    """Return False for an empty file. Raises ResourceError for text that is not UTF-8 from its beginning, and for a
    JSON array in a file of JSON Lines."""
    with file.open() as stream, reading(file.uri):
        start = stream.read(_START)
    if file.format not in ("jsonl", "json", "csv"):
        return True
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start:
        advice = "the text is UTF-16 or UTF-32, or no text; expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8 FILE"
        raise ResourceError(f"{file.uri}: {advice}")
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if file.format == "jsonl" and text.startswith(b"[") and text[1:].lstrip()[:1] in (b"{", b""):
        raise ResourceError(f"{file.uri}: holds a JSON array, not one object a line. Set data.format=json")
    return bool(text) or len(start) == _START or file.format == "csv"  # a table has a header


def _refuse(broken: BrokenRow) -> None:
    raise ResourceError(str(broken))


def _jsonl(file: DataFile, on_broken: OnBroken) -> Iterator[DataRow]:
    import orjson

    with file.open() as stream:
        number = 0
        while line := _line(stream, file):
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            if len(line) > LONGEST_LINE:
                on_broken(BrokenRow(number, file.uri, f"the line is longer than {LONGEST_LINE} bytes"))
                while line and not line.endswith(b"\n"):
                    line = _line(stream, file)
                continue
            try:
                values = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                on_broken(BrokenRow(number, file.uri, _invalid_json(line, error)))
                continue
            if isinstance(values, dict):
                yield DataRow(number, file.uri, values)
            else:
                on_broken(BrokenRow(number, file.uri, _not_an_object(values)))


def _invalid_json(line: bytes, error: ValueError) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as undecoded:
        return f"the text is not UTF-8: byte 0x{line[undecoded.start]:02x} at position {undecoded.start}"
    return f"invalid JSON: {error}"


def _line(stream: IO[bytes], file: DataFile) -> bytes:
    with reading(file.uri):
        return stream.readline(LONGEST_LINE + 1)


def _json(file: DataFile, on_broken: OnBroken) -> Iterator[DataRow]:
    if _holds_lines(file):
        yield from _jsonl(file, on_broken)
        return
    with file.open() as stream:
        try:
            for number, values in enumerate(json_rows(stream), 1):
                if isinstance(values, dict):
                    yield DataRow(number, file.uri, values)
                else:
                    on_broken(BrokenRow(number, file.uri, _not_an_object(values)))
        except InvalidJSON as error:
            raise ResourceError(f"{file.uri}: {error}") from None


def _holds_lines(file: DataFile) -> bool:
    """Return True if a file named `.json` holds JSON Lines: its first line is an object, and others follow."""
    import orjson

    with file.open() as stream:
        first = _line(stream, file).removeprefix(b"\xef\xbb\xbf").strip()
        if not first.startswith(b"{") or not any(line.strip() for line in iter(lambda: _line(stream, file), b"")):
            return False
    try:
        return isinstance(orjson.loads(first), dict)
    except orjson.JSONDecodeError:
        return False


def _not_an_object(values: Any) -> str:
    return f"expected a JSON object, got a {type(values).__name__}"


def _csv(file: DataFile, on_broken: OnBroken) -> Iterator[DataRow]:
    with file.open() as stream, reading(file.uri):
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, delimiter="\t" if file.tab_separated else ",")
        header = _record(reader)
        if not isinstance(header, list) or not header:
            raise ResourceError(f"{file.uri}: expected a header with the names of the columns in the first line")
        if len(set(header)) < len(header):
            raise ResourceError(f"{file.uri}: two columns have the same name; expected different names: {header}")
        while True:
            number = reader.line_num + 1
            record = _record(reader)
            if record is None:
                return
            if isinstance(record, str):
                on_broken(BrokenRow(number, file.uri, record))
            elif len(record) == len(header):
                yield DataRow(number, file.uri, dict(zip(header, record, strict=True)))
            elif record:
                reason = f"{len(record)} fields; expected {len(header)}, as in the header"
                on_broken(BrokenRow(number, file.uri, reason))


def _record(reader: Any) -> list[str] | str | None:
    """Return the next record, the reason why it cannot be read, or None at the end."""
    try:
        record = next(reader, None)
    except csv.Error as error:
        return f"invalid CSV: {error}; expected fields of at most {csv.field_size_limit()} characters"
    if any(_UNDECODED.search(field) for field in record or ()):
        return "the text is not UTF-8"
    return record


def _parquet(file: DataFile, on_broken: OnBroken) -> Iterator[DataRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with file.open() as stream:
        try:
            table = pq.ParquetFile(stream)
            number = 0
            for group in range(table.num_row_groups):
                for batch in table.iter_batches(PARQUET_BATCH, row_groups=[group]):
                    for values in batch.to_pylist(maps_as_pydicts="lossy"):
                        number += 1
                        yield DataRow(number, file.uri, json_data(values))
        except pa.ArrowException as error:
            raise ResourceError(f"{file.uri} is not a complete Parquet file: {error}") from None


def _arrow(file: DataFile, on_broken: OnBroken) -> Iterator[DataRow]:
    import pyarrow as pa

    with file.open() as stream:
        try:
            number = 0
            for batch in pa.ipc.open_stream(stream):
                for start in range(0, batch.num_rows, PARQUET_BATCH):
                    for values in batch.slice(start, PARQUET_BATCH).to_pylist(maps_as_pydicts="lossy"):
                        number += 1
                        yield DataRow(number, file.uri, json_data(values))
        except pa.ArrowException as error:
            raise ResourceError(f"{file.uri} is not a complete Arrow stream: {error}") from None


def json_data(value: Any) -> Any:
    """Return a value of a table as JSON data: times as ISO text, decimals as numbers, binary values as None."""
    match value:
        case dict():
            return {str(key): json_data(item) for key, item in value.items()}
        case list() | tuple():
            return [json_data(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
        case date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return float(value)
    return None


_READERS: dict[str, Callable[[DataFile, OnBroken], Iterator[DataRow]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": _csv,
    "parquet": _parquet,
    "arrow": _arrow,
}
