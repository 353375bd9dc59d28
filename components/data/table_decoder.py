"""Decoder of Parquet and Arrow files, the child side of `components.data.tables`.

A file of 900 bytes can hold gigabytes: a page states its size and compresses 1,000 times or more, and equal values are
stored once. No check of the metadata bounds that, because the statements of a file need not be true. The process
therefore limits its own memory, and measures the rows that it has decoded before it passes them on.

Rows are passed on as record batches within the limits of a row (`components.data.rows`), in files of Arrow's IPC
format. They have plain types: dictionaries, views and extensions are resolved, so their size is that of their values.
"""

from __future__ import annotations

import functools
import itertools
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from components.data.rows import DECODING_MEMORY, ROW_BYTES, ROW_VALUES, too_large

_READ = 1 << 20
"""Bytes that are read from a Parquet file at a time, for each column."""


class TableDecoder:
    """Target of the child process: opens a file, then returns its rows, a batch for each call."""

    def __init__(self) -> None:
        pa.set_memory_pool(pa.system_memory_pool())
        self._start = psutil.Process().memory_info().vms
        self._answers: Iterator[dict[str, Any]] = iter(())

    def __call__(
        self, path: str | None = None, format: str = "", start: int = 0, count: int = 1, folder: str = ""
    ) -> dict[str, Any] | None:
        """Return the next rows of the file, as the file `rows` and their number, or an `oversize` row; None at the end.

        path: opens a file. start: number of rows to skip. count: number of rows that are decoded at a time. folder:
        place of two files that rows are written to in turn: the parent reads one while this process writes the other.
        """
        if path is not None:
            more = os.path.getsize(path) if format == "arrow" else 0
            _limit_memory(self._start + DECODING_MEMORY + more)
            batches = _parquet(path, start, count) if format == "parquet" else _arrow(path, start, count)
            self._answers = _answers(batches, Path(folder))
        return next(self._answers, None)


def _limit_memory(size: int) -> None:
    if sys.platform != "darwin":  # macOS refuses every value
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _answers(batches: Iterator[pa.RecordBatch], folder: Path) -> Iterator[dict[str, Any]]:
    files = itertools.cycle([str(folder / "even"), str(folder / "odd")])
    for batch in batches:
        batch.validate(full=True)  # before its offsets are used
        for part in _parts(_plain(batch)):
            size, values = part.nbytes, _values(part)
            if size > ROW_BYTES:
                yield {"oversize": str(too_large(size)), "count": 1}
            elif values > ROW_VALUES:
                yield {"oversize": str(too_large(values, "values")), "count": 1}
            else:
                file = next(files)
                with pa.OSFile(file, "wb") as sink, pa.ipc.new_stream(sink, part.schema) as stream:
                    stream.write_batch(part)
                yield {"rows": file, "count": part.num_rows}


def _parquet(path: str, start: int, count: int) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    # Columns are read in blocks, not as a whole, and in this thread, so that batches take the memory of their rows.
    with pq.ParquetFile(path, buffer_size=_READ, pre_buffer=False) as table:
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if start >= rows:
                start -= rows
                continue
            for batch in table.iter_batches(count, row_groups=[group], use_threads=False):
                yield batch.slice(start)
                start = max(start - batch.num_rows, 0)


def _arrow(path: str, start: int, count: int) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(path) as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            for first in range(min(start, batch.num_rows), batch.num_rows, count):
                yield batch.slice(first, count)
            start = max(start - batch.num_rows, 0)


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in parts within the limits of a row, or of one row."""
    if batch.num_rows > 1 and (batch.nbytes > ROW_BYTES or _values(batch) > ROW_VALUES):
        half = batch.num_rows // 2
        yield from _parts(batch.slice(0, half))
        yield from _parts(batch.slice(half))
    elif batch.num_rows:
        yield batch


def _values(batch: pa.RecordBatch) -> int:
    return sum(_values_of_array(column) for column in batch.columns)


def _values_of_array(array: pa.Array) -> int:
    """Return the number of values, those in lists and structs included, also behind a null."""
    kind = array.type
    if pa.types.is_struct(kind):
        inner = [array.field(index) for index in range(kind.num_fields)]
    elif pa.types.is_fixed_size_list(kind):
        inner = [array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)]
    elif pa.types.is_nested(kind) and len(array):  # a list or a map
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        inner = [array.values.slice(first, last - first)]
    else:
        inner = []
    return len(array) + sum(map(_values_of_array, inner))


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with the same values in plain types. Only columns of other types are cast, because a cast of lists
    of nulls fails."""
    schema = _plain_schema(batch.schema)
    if schema == batch.schema:
        return batch
    pairs = zip(batch.columns, schema.types, strict=True)
    return pa.record_batch(
        [column if column.type == kind else column.cast(kind) for column, kind in pairs], schema=schema
    )


@functools.cache
def _plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([(field.name, _plain_type(field.type)) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same values in which nothing is shared. Raises ValueError if there is none."""
    match kind:
        case pa.BaseExtensionType():
            return _plain_type(kind.storage_type)
        case pa.DictionaryType():
            return _plain_type(kind.value_type)
        case pa.MapType():
            return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
        case pa.FixedSizeListType():
            return pa.list_(_plain_type(kind.value_type), kind.list_size)
        case pa.ListType():
            return pa.list_(_plain_type(kind.value_type))
        case pa.LargeListType():
            return pa.large_list(_plain_type(kind.value_type))
        case pa.StructType():
            return pa.struct([(field.name, _plain_type(field.type)) for field in kind])
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.string() if pa.types.is_string_view(kind) else pa.binary()
    if pa.types.is_nested(kind) or pa.types.is_run_end_encoded(kind):
        raise ValueError(f"columns of the type {str(kind)[:200]} are not supported")
    return kind
