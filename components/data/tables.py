"""Rows of Parquet and Arrow files, which a child process decodes (`components.data.table_decoder`).

The child limits its memory and measures each row, so this process only receives batches within the limits of a row. It
decodes COUNT rows at a time; where these exceed its memory, a new child decodes row by row. A row that is too large is
broken. A row that cannot be decoded within the memory ends the file, because no reader can continue behind it.

    with Tables() as tables:                        # one child for all files
        for row in tables.rows(file, on_broken): ...
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

from components.data.files import DataFile, reading
from components.data.rows import DECODING_MEMORY, BrokenRow, DataRow, OnBroken
from components.errors import ResourceError
from components.json_process import (
    JsonProcess,
    JsonProgram,
    ProcessExited,
    RequestFailed,
    safe_environment,
)

COUNT = 1024
"""Rows of a file that are decoded at a time."""
SECONDS = 600.0
"""Time limit of one batch in seconds."""
MOST_OVERSIZE = 100
"""Number of rows of a file that may be too large. More end the file: 300 bytes can hold a million of them."""
MOST_WRITTEN = 64 << 20
"""Maximum size of a batch on its way, in bytes."""
MOST_COPIED = 64 << 20
RATIO = 100
"""A compressed file may have MOST_COPIED bytes, or RATIO times its size."""
NAMES = {"parquet": "Parquet file", "arrow": "Arrow stream"}
_BLOCK = 1 << 20
_ALLOCATION = re.compile(r"alloc of size (\d+) failed")


class OutOfMemory(Exception):
    """End of a child at the limit of its memory. needed: bytes that it lacked, at least."""

    def __init__(self, needed: int):
        self.needed = needed
        super().__init__(needed)


class Tables:
    """Reader of tables. Its child process starts with the first file."""

    def __init__(self) -> None:
        self._process: JsonProcess | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """Rows on their way from the child, and the copy of a file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()
        if self._folder is not None:
            self._folder.cleanup()

    def rows(self, file: DataFile, on_broken: OnBroken) -> Iterator[DataRow]:
        """Yield the rows of a file. Raises ResourceError if it is damaged, or exceeds the memory of the decoder."""
        number = oversize = 0
        self._folder = self._folder or tempfile.TemporaryDirectory()
        for answer in self._answers(file, _local_path(file, Path(self._folder.name, "copy"))):
            if "oversize" in answer:
                number, oversize = number + 1, oversize + 1
                broken = BrokenRow(number, file.uri, answer["oversize"])
                if oversize > MOST_OVERSIZE:
                    raise ResourceError(f"{broken}; {MOST_OVERSIZE} rows before it are too large as well. Split them")
                on_broken(broken)
                continue
            for values in _read(answer["rows"]).to_pylist(maps_as_pydicts="lossy"):
                number += 1
                yield DataRow(number, file.uri, json_data(values))

    def _answers(self, file: DataFile, path: Path) -> Iterator[Mapping[str, Any]]:
        """Yield the child's answers: in batches, and row by row from the batch that exceeds its memory."""
        number, count = 0, COUNT
        while True:
            try:
                for answer in self._decode(file, {"path": str(path), "start": number, "count": count}):
                    number += answer["count"]
                    yield answer
                return
            except OutOfMemory as error:
                self._stop()
                if count == 1:
                    needed = f"{error.needed} bytes of memory; expected at most {DECODING_MEMORY}"
                    reason = f"decoding the row takes at least {needed}"
                    raise ResourceError(str(BrokenRow(number + 1, file.uri, reason))) from None
                count = 1

    def _decode(self, file: DataFile, request: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the answers of one child; it decodes the next while one is used. Raises OutOfMemory."""
        assert self._folder is not None
        process = self._process = self._process or JsonProcess(_program())
        answer = process.request({**request, "format": file.format, "folder": self._folder.name})
        try:
            while (batch := answer.result(SECONDS)) is not None:
                answer = process.request({})
                yield batch
        except RequestFailed as error:
            if error.kind in ("ArrowMemoryError", "MemoryError"):
                raise OutOfMemory(_needed(error.text)) from None
            raise ResourceError(f"{file.uri} is not a complete {NAMES[file.format]}: {error.text}") from None
        except ProcessExited as error:
            if error.code >= 0:
                raise ResourceError(f"{file.uri}: the process that decodes it ended: {error}") from None
            raise OutOfMemory(_needed(error.stderr)) from None  # libraries abort when memory is lacking
        except TimeoutError:
            raise ResourceError(f"{file.uri}: decoding {request['count']} rows took more than {SECONDS:g} s") from None

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None


def _program() -> JsonProgram:
    # Blocks that are freed go back to the system at once, so that the limit counts memory in use.
    allocation = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    variables = {**safe_environment(), **allocation, "OMP_NUM_THREADS": "1"}
    limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": MOST_WRITTEN}
    return JsonProgram("components.data.table_decoder:TableDecoder", variables=variables, limits=limits)


def _needed(text: str) -> int:
    """Return the memory that a decoder lacked, according to its error."""
    return max([DECODING_MEMORY, *map(int, _ALLOCATION.findall(text))])


def _local_path(file: DataFile, copy: Path) -> Path:
    """Return the path of the decompressed file on this machine: its own, or that of a copy."""
    if file.local is not None and file.compression is None:
        return file.local
    most = math.inf if file.compression is None else max(MOST_COPIED, RATIO * file.size())
    with file.open() as source, reading(file.uri), copy.open("wb") as target:
        while block := source.read(_BLOCK):
            target.write(block)
            if target.tell() > most:
                text = f"the decompressed file has more than {most} bytes, {RATIO} times its size; decompress it first"
                raise ResourceError(f"{file.uri}: {text}")
    return copy


def _read(path: str) -> Any:
    import pyarrow as pa

    with pa.OSFile(path) as file, pa.ipc.open_stream(file) as stream:
        return stream.read_next_batch()


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
