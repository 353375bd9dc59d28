"""Finished rows of an unfinished stage, in files of its scratch folder, so that a retry resumes from them."""

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
"""Maximum delay until a finished row is on disk, in seconds."""
FLUSH_ROWS = 4096
"""Maximum number of rows in memory."""


class FinishedRows(Generic[Row]):
    """Finished rows in files `NAME-00000.parquet` and so on.

    `write` must be atomic: a file appears under its name only when it is complete. Files of earlier attempts are
    untrusted: those that `read` cannot read are removed. The stage calls `flush` at its end, also after an error.
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
        """Yield the rows of earlier attempts in their original order. Call it before the first `add`. A damaged file
        is removed with a warning, and its rows are recomputed."""
        for path in sorted(self.folder.glob(f"{self.name}-*.parquet")):
            try:
                number = int(path.stem.removeprefix(f"{self.name}-"))
                rows = list(self._read(path))
            except Exception as error:  # noqa: BLE001  what a reader raises depends on where the file is damaged
                log.warning("%s is damaged; its rows are recomputed: %s: %s", path, type(error).__name__, error)
                path.unlink()
            else:
                self._next = max(self._next, number + 1)
                yield from rows

    def add(self, rows: Sequence[Row]) -> None:
        """Add finished rows; rows of one call stay in one file."""
        with self._lock:
            self._pending += rows
            delay = self._flushed + FLUSH_SECONDS - time.monotonic()
            if delay <= 0 or len(self._pending) >= FLUSH_ROWS:
                self.flush()
            elif self._timer is None:  # the next row may take long
                self._timer = threading.Timer(delay, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Write the pending rows."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._pending:
                self._write(self.folder / f"{self.name}-{self._next:05d}.parquet", self._pending)
                self._next += 1
                self._pending = []
            self._flushed = time.monotonic()
