"""Join of files with one row per trajectory, in the same order: trajectories with their scores and their selection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from components.errors import ArtifactDamaged
from components.trajectories.tables import original_text


class AlignedRows:
    """Rows of a file that was made from a file of trajectories, taken with the rows of that file."""

    def __init__(self, path: Path, batches: Iterator[pa.RecordBatch], trajectories: Path):
        self.path = path
        self._batches = batches
        self._trajectories = trajectories
        self._rest: pa.RecordBatch | None = None
        """Rows that were read and not yet taken."""

    def take(self, ids: pa.StringArray) -> pa.RecordBatch:
        """Return the rows of the next trajectories. Raises ArtifactDamaged if a row is for another trajectory."""
        rows = self._next(len(ids))
        row_ids = rows.column("trajectory_id")
        known = ids[: len(rows)]
        if not pc.all(pc.equal(row_ids, known)).as_py() and len(rows):
            place = pc.indices_nonzero(pc.not_equal(row_ids, known))[0].as_py()
            raise self._mismatch(f"{_id(row_ids, place)} stands where {_id(ids, place)} should")
        if len(rows) < len(ids):
            raise self._mismatch(f"it ends before {_id(ids, len(rows))}")
        return rows

    def end(self) -> None:
        """Raise ArtifactDamaged if there are further rows."""
        if len(rows := self._next(1)):
            raise self._mismatch(f"{_id(rows.column('trajectory_id'), 0)} comes after the last trajectory")

    def _next(self, count: int) -> pa.RecordBatch:
        """Return the next rows; fewer than `count` at the end of the file."""
        held = [] if self._rest is None else [self._rest]
        available = sum(map(len, held))
        while available < count and (batch := next(self._batches, None)) is not None:
            held.append(batch)
            available += len(batch)
        if not held:
            return pa.RecordBatch.from_pydict({"trajectory_id": pa.array([], pa.string())})
        rows = held[0] if len(held) == 1 else pa.concat_batches(held)
        self._rest = rows.slice(count)
        return rows.slice(0, count)

    def _mismatch(self, detail: str) -> ArtifactDamaged:
        return ArtifactDamaged(f"{self.path} was not made from {self._trajectories}: {detail}")


def _id(ids: pa.StringArray, place: int) -> str:
    return original_text(ids[place].as_py())
