"""The finished part of an unfinished stage: rows in files of its scratch folder, for the next try to go on from."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Row = TypeVar("Row")

FLUSH_SECONDS = 0.1
"""Finished rows are on disk this much later at most."""
FLUSH_ROWS = 4096
"""Rows that wait in memory at most."""


class Shards(Generic[Row]):
    """Rows that are done, in files `NAME-00000.parquet` and so on.

    `write` has to make a file appear under its name only when it is complete, so that a kill at any moment leaves
    nothing half; `read` raises ValueError for what it cannot read. The stage calls `flush` at its end, however it ends.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        write: Callable[[Path, Sequence[Row]], object],
        read: Callable[[Path], Iterable[Row]],
    ):
        self.folder = folder
        self.name = name
        self._write = write
        self._read = read
        self._next = 0
        self._pending: list[Row] = []
        self._flushed = time.monotonic()
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None

    def read(self) -> Iterator[Row]:
        """The rows of earlier tries, in the order in which they were done; to be called before the first `add`. A file
        that cannot be read to its end (the machine itself went down) is removed with a warning: its rows are made
        again."""
        for path in sorted(self.folder.glob(f"{self.name}-*.parquet")):
            self._next = int(path.stem.rpartition("-")[2]) + 1
            try:
                rows = list(self._read(path))
            except ValueError as error:
                log.warning("kept work is lost and done again: %s", error)
                path.unlink()
            else:
                yield from rows

    def add(self, rows: Sequence[Row]) -> None:
        """Keeps more; rows that are added together are never divided between files."""
        with self._lock:
            self._pending += rows
            left = self._flushed + FLUSH_SECONDS - time.monotonic()
            if left <= 0 or len(self._pending) >= FLUSH_ROWS:
                self.flush()
            elif self._timer is None:  # the next row may be long in coming
                self._timer = threading.Timer(left, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Writes what is not written yet."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._pending:
                self._write(self.folder / f"{self.name}-{self._next:05d}.parquet", self._pending)
                self._next += 1
                self._pending = []
            self._flushed = time.monotonic()
