"""The store of trajectories, scores and selections: Parquet files, lossless, written and read as streams.

`components.trajectories.tables` says how each row is laid out; this module owns the files. A file's metadata say what
it holds and by which schema version, and reading checks both before the first row. A file appears under its name when
it is complete: a writer that dies, or whose rows raise, leaves nothing that could be taken for one. Equal rows give
equal bytes, so an artifact's digest says whether the data are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from components.errors import ArtifactDamaged, ArtifactError, SchemaMismatch
from components.trajectories import tables
from components.trajectories.schema import SCHEMA_VERSION, Score, Selection, Trajectory

Row = TypeVar("Row")

ROWS_PER_GROUP = 256
"""Rows that a writer holds in memory at once."""
ROWS_PER_BATCH = 64
"""Rows that a reader holds in memory at once."""

_KIND = b"espalier.kind"
_VERSION = b"espalier.schema_version"


@dataclass(frozen=True)
class _Table(Generic[Row]):
    """One kind of file."""

    kind: str
    schema: pa.Schema
    to_row: Callable[[Row], dict[str, Any]]
    from_row: Callable[[dict[str, Any]], Row]

    def write(self, path: Path, rows: Iterable[Row]) -> int:
        metadata = {_KIND: self.kind.encode(), _VERSION: str(SCHEMA_VERSION).encode()}
        schema = self.schema.with_metadata(metadata)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        count = 0
        try:
            with pq.ParquetWriter(part, schema, compression="zstd") as writer:
                remaining = iter(rows)
                while chunk := [self.to_row(row) for row in islice(remaining, ROWS_PER_GROUP)]:
                    writer.write_batch(pa.RecordBatch.from_pylist(chunk, schema=schema))
                    count += len(chunk)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return count

    def read(self, path: Path) -> Iterator[Row]:
        with self._open(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
                for row in batch.to_pylist():
                    yield self.from_row(row)

    def _open(self, path: Path) -> pq.ParquetFile:
        try:
            file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise ArtifactDamaged(f"{path} is no complete Parquet file: {error}") from error
        metadata = file.schema_arrow.metadata or {}
        kind, version = (metadata[key].decode() if key in metadata else None for key in (_KIND, _VERSION))
        if (kind, version) != (self.kind, str(SCHEMA_VERSION)):
            file.close()
            found = "a Parquet file of another program" if kind is None else f"{kind} in schema version {version}"
            raise SchemaMismatch(
                f"{path} holds {found}; expected {self.kind} in schema version {SCHEMA_VERSION}. "
                "Run the stage that made it again with this version of Espalier."
            )
        return file


_TRAJECTORIES = _Table("trajectories", tables.TRAJECTORY_SCHEMA, tables.trajectory_row, tables.trajectory_from_row)
_SCORES = _Table("scores", tables.SCORE_SCHEMA, tables.score_row, tables.score_from_row)
_SELECTION = _Table("selection", tables.SELECTION_SCHEMA, tables.selection_row, tables.selection_from_row)


def write_trajectories(path: Path, rows: Iterable[Trajectory]) -> int:
    """Writes all rows, in order, and returns how many. Raises TypeError, with the trajectory's id, where a field that
    should be JSON data is not."""
    return _TRAJECTORIES.write(path, rows)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Rows in the order in which they were written, a few at a time in memory.

    Raises SchemaMismatch where the file holds something else or another schema version, ArtifactDamaged where it is no
    complete Parquet file, both before the first row.
    """
    return _TRAJECTORIES.read(path)


def write_scores(path: Path, rows: Iterable[Score]) -> int:
    """As write_trajectories."""
    return _SCORES.write(path, rows)


def read_scores(path: Path) -> Iterator[Score]:
    """As read_trajectories."""
    return _SCORES.read(path)


def write_selection(path: Path, rows: Iterable[Selection]) -> int:
    """As write_trajectories."""
    return _SELECTION.write(path, rows)


def read_selection(path: Path) -> Iterator[Selection]:
    """As read_trajectories."""
    return _SELECTION.read(path)


def load_scored(trajectories: Path, scores: Path, selection: Path | None) -> list[Trajectory]:
    """Trajectories with their rewards joined on, in stored order: those that `selection` keeps, or all where it is
    None. A reward of None means unscored.

    Raises ArtifactError where the files do not belong together: each trajectory needs exactly one score and, with a
    selection, one decision.
    """
    rewards = _by_id(scores, ((score.trajectory_id, score.reward) for score in read_scores(scores)))
    kept = None
    if selection is not None:
        kept = _by_id(selection, ((item.trajectory_id, item.kept) for item in read_selection(selection)))
    loaded: list[Trajectory] = []
    seen: set[str] = set()
    for trajectory in read_trajectories(trajectories):
        seen.add(trajectory.id)
        trajectory.reward = rewards.get(trajectory.id)
        if kept is None or kept.get(trajectory.id):
            loaded.append(trajectory)
    _same_ids(trajectories, seen, scores, rewards)
    if selection is not None and kept is not None:
        _same_ids(trajectories, seen, selection, kept)
    return loaded


Value = TypeVar("Value")


def _by_id(path: Path, pairs: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, value in pairs:
        if name in values:
            raise ArtifactError(f"{path} speaks twice of trajectory {name}")
        values[name] = value
    return values


def _same_ids(path: Path, ids: set[str], other: Path, others: dict[str, Any]) -> None:
    if unmatched := sorted(ids ^ others.keys()):
        raise ArtifactError(
            f"{other} was not made from {path}: {len(unmatched)} trajectories are in one of them only, "
            f"such as {unmatched[0]}"
        )
