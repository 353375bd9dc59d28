"""The store of trajectories, scores and selections: Parquet files, lossless, written and read as streams.

`components.trajectories.tables` says how each row is laid out; this module owns the files. A file's metadata say what
it holds and by which schema version, and reading checks both before the first row. A file appears under its name when
it is complete: a writer that dies, or whose rows raise, leaves nothing that could be taken for one. Equal rows give
equal bytes, so an artifact's digest says whether the data are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from components.errors import ArtifactDamaged, SchemaMismatch
from components.trajectories import tables
from components.trajectories.schema import SCHEMA_VERSION, Failure, Score, Selection, Trajectory

Row = TypeVar("Row")

ROWS_PER_CHUNK = 256
"""Rows that a writer turns into columns at once."""
GROUP_BYTES = 16 * 2**20
"""Size in memory from which on columns are written as a row group. Many small ones would make a large footer, which
readers hold: 40 KB a group."""
ROWS_PER_BATCH = 64
"""Rows that a reader turns into objects at once."""

_KIND = b"espalier.kind"
_VERSION = b"espalier.schema_version"


@dataclass(frozen=True)
class _Table(Generic[Row]):
    """One kind of file."""

    kind: str
    schema: pa.Schema
    to_row: Callable[[Row], dict[str, Any]]
    from_batch: Callable[[pa.RecordBatch], Iterable[Row]]

    def write(self, path: Path, rows: Iterable[Row]) -> int:
        metadata = {_KIND: self.kind.encode(), _VERSION: str(SCHEMA_VERSION).encode()}
        schema = self.schema.with_metadata(metadata)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        count = 0
        try:
            with pq.ParquetWriter(part, schema, compression="zstd") as writer:
                remaining = iter(rows)
                group: list[pa.RecordBatch] = []
                while chunk := [self.to_row(row) for row in islice(remaining, ROWS_PER_CHUNK)]:
                    group.append(pa.RecordBatch.from_pylist(chunk, schema=schema))
                    count += len(chunk)
                    if sum(batch.nbytes for batch in group) >= GROUP_BYTES:
                        writer.write_table(pa.Table.from_batches(group))
                        group = []
                if group:
                    writer.write_table(pa.Table.from_batches(group))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return count

    def read(self, path: Path) -> Iterator[Row]:
        for batch in self.batches(path):
            yield from self.from_batch(batch)

    def batches(self, path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        with self._open(path) as file:
            try:
                for group in range(file.num_row_groups):  # one reader for all would keep 2 KB of each row it has passed
                    yield from file.iter_batches(ROWS_PER_BATCH, row_groups=[group], columns=columns)
            except (pa.ArrowException, OSError) as error:
                raise ArtifactDamaged(f"{path} cannot be read to its end: {error}") from error

    def count(self, path: Path) -> int:
        with self._open(path) as file:
            return file.metadata.num_rows

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


_TRAJECTORIES = _Table("trajectories", tables.TRAJECTORY_SCHEMA, tables.trajectory_row, tables.trajectories)
_SCORES = _Table("scores", tables.SCORE_SCHEMA, tables.score_row, tables.scores)
_SELECTION = _Table("selection", tables.SELECTION_SCHEMA, tables.selection_row, tables.selections)


def write_trajectories(path: Path, rows: Iterable[Trajectory]) -> int:
    """Writes all rows, in order, and returns how many. Raises TypeError, with the trajectory's id, where a field that
    should be JSON data is not."""
    return _TRAJECTORIES.write(path, rows)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Rows in the order in which they were written, a few at a time in memory.

    Raises SchemaMismatch where the file holds something else or another schema version, ArtifactDamaged where it is no
    complete Parquet file, both before the first row; ArtifactDamaged too where a later part of it cannot be read.
    """
    return _TRAJECTORIES.read(path)


def count_trajectories(path: Path) -> int:
    """How many rows the file has, without reading them. Raises as read_trajectories."""
    return _TRAJECTORIES.count(path)


def read_failures(path: Path) -> Iterator[tuple[str, Failure]]:
    """Yield the id and the failure of each trajectory that failed; no other column is read. Raises as
    read_trajectories."""
    for batch in _TRAJECTORIES.batches(path, ["id", "failure"]):
        yield from tables.failures(batch)


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


def read_scored(
    trajectories: Path, scores: Path, selection: Path | None = None, *, components: bool = False
) -> Iterator[Trajectory]:
    """Trajectories with their rewards joined on, a few at a time in memory: those that `selection` keeps, or all where
    it is None. A reward of None means unscored. Where the judge gave step rewards, they stand in place of those of the
    environment: whoever judges turns has the last word on them. Where it gave none, the environment's stay.

    components: those of the scores are joined on too, among the metrics. A metric of the same name stays, and so does a
    number of the outcome: a component is a part of a reward, and has its sign.

    The files are read side by side: each has one row for each trajectory, in the same order, as judge and filter write
    them. Raises ArtifactDamaged, naming the file, at the first row where that is not so, and as read_trajectories.
    """
    rewards = _Beside(scores, _rewards(scores, components), trajectories)
    kept = None
    if selection is not None:
        kept = _Beside(selection, ((item.trajectory_id, item.kept) for item in read_selection(selection)), trajectories)
    for trajectory in read_trajectories(trajectories):
        trajectory.reward, judged_steps, parts = rewards.take(trajectory.id)
        if judged_steps:
            trajectory.step_rewards = judged_steps
        new = {name: value for name, value in parts.items() if name not in trajectory.outcome}
        trajectory.metrics = {**new, **trajectory.metrics}
        if kept is None or kept.take(trajectory.id):
            yield trajectory
    rewards.end()
    if kept is not None:
        kept.end()


def load_scored(
    trajectories: Path, scores: Path, selection: Path | None, *, components: bool = False
) -> list[Trajectory]:
    """As read_scored, all at once: for what needs every trajectory, as training does."""
    return list(read_scored(trajectories, scores, selection, components=components))


_Given = tuple[float | None, list[float], dict[str, float]]


def _rewards(path: Path, components: bool) -> Iterator[tuple[str, _Given]]:
    columns = ["trajectory_id", "reward", "step_rewards", *(["components"] if components else [])]
    for batch in _SCORES.batches(path, columns):
        for name, reward, steps, parts in tables.rewards(batch):
            yield name, (reward, steps, parts)


Value = TypeVar("Value")


class _Beside(Generic[Value]):
    """What a file says about each trajectory, read beside the file of trajectories."""

    def __init__(self, path: Path, pairs: Iterator[tuple[str, Value]], trajectories: Path):
        self.path = path
        self._pairs = pairs
        self._trajectories = trajectories

    def take(self, trajectory_id: str) -> Value:
        for found, value in self._pairs:
            if found == trajectory_id:
                return value
            raise self._other(f"{found} stands where {trajectory_id} should")
        raise self._other(f"it ends before {trajectory_id}")

    def end(self) -> None:
        for found, _ in self._pairs:
            raise self._other(f"{found} comes after the last trajectory")

    def _other(self, why: str) -> ArtifactDamaged:
        return ArtifactDamaged(f"{self.path} was not made from {self._trajectories}: {why}")
