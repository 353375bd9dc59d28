"""The store of trajectories, scores and selections: Parquet files, lossless, written and read as streams.

`components.trajectories.tables` defines the row format, `components.trajectories.decode` reads it; this module owns the
files. A file's metadata contain its kind and schema version, which are checked before the first row is read. Files are
written atomically: an interrupted writer leaves no partial file under the final name. Equal rows give equal bytes, so
equal data have equal artifact digests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.errors import ArtifactDamaged, SchemaMismatch
from components.trajectories import decode, tables
from components.trajectories.schema import SCHEMA_VERSION, Failure, Score, Selection, Trajectory
from components.trajectories.tables import AlignedRows

Row = TypeVar("Row")

ROWS_PER_CHUNK = 256
"""Rows per conversion to columns in a writer."""
GROUP_BYTES = 16 * 2**20
"""Size in memory from which columns are written as a row group. Each row group adds 40 KB to the footer, which readers
hold in memory."""
ROWS_PER_BATCH = 64
"""Rows per conversion to objects in a reader."""
ROWS_PER_NARROW_BATCH = 65_536
"""Rows per batch of some columns; at most those of a row group."""

_KIND = b"espalier.kind"
_VERSION = b"espalier.schema_version"


@dataclass(frozen=True)
class _Table(Generic[Row]):
    """Reader and writer of one kind of file."""

    kind: str
    schema: pa.Schema
    to_row: Callable[[Row], dict[str, Any]]
    from_batch: Callable[[pa.RecordBatch], Iterable[Row]]

    def write(self, path: Path, rows: Iterable[Row]) -> int:
        with self.writer(path) as write:
            remaining = iter(rows)
            return sum(write(chunk) for chunk in iter(lambda: list(islice(remaining, ROWS_PER_CHUNK)), []))

    @contextmanager
    def writer(self, path: Path) -> Iterator[Callable[[Sequence[Row]], int]]:
        """Give a function that appends rows and returns their number; the file appears at the end."""
        with self._appender(path) as append:

            def write(rows: Sequence[Row]) -> int:
                append(pa.RecordBatch.from_pylist([self.to_row(row) for row in rows], schema=self.schema))
                return len(rows)

            yield write

    def write_batches(self, path: Path, batches: Iterable[pa.RecordBatch]) -> int:
        """Write columns; the file has the bytes that `write` gives it for the same rows."""
        total = 0
        with self._appender(path) as append:
            pending: list[pa.RecordBatch] = []
            for batch in batches:
                joined = pa.concat_batches([*pending, batch])
                total += len(batch)
                whole = len(joined) - len(joined) % ROWS_PER_CHUNK
                for start in range(0, whole, ROWS_PER_CHUNK):
                    append(joined.slice(start, ROWS_PER_CHUNK))
                pending = [joined.slice(whole)]
            for batch in pending:
                if len(batch):
                    append(batch)
        return total

    @contextmanager
    def _appender(self, path: Path) -> Iterator[Callable[[pa.RecordBatch], None]]:
        """Give a function that appends a batch. Row groups and pages depend on the size of batches."""
        metadata = {_KIND: self.kind.encode(), _VERSION: str(SCHEMA_VERSION).encode()}
        schema = self.schema.with_metadata(metadata)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        group: list[pa.RecordBatch] = []
        size = 0
        try:
            with pq.ParquetWriter(part, schema, compression="zstd") as file:

                def append(batch: pa.RecordBatch) -> None:
                    nonlocal size
                    group.append(batch.replace_schema_metadata(metadata))
                    size += batch.nbytes
                    if size >= GROUP_BYTES:
                        file.write_table(pa.Table.from_batches(group))
                        group.clear()
                        size = 0

                yield append
                if group:
                    file.write_table(pa.Table.from_batches(group))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def read(self, path: Path) -> Iterator[Row]:
        for batch in self.batches(path):
            yield from self.from_batch(batch)

    def batches(
        self, path: Path, columns: Sequence[str] | None = None, rows: int = ROWS_PER_BATCH
    ) -> Iterator[pa.RecordBatch]:
        with self._open(path) as file:
            try:
                for group in range(file.num_row_groups):  # one reader for all groups would retain 2 KB per row read
                    yield from file.iter_batches(rows, row_groups=[group], columns=columns)
            except (pa.ArrowException, OSError) as error:
                raise ArtifactDamaged(f"{path} cannot be read to its end: {error}") from error

    def at(self, path: Path, places: Sequence[int], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return the rows at these positions, at least one, in their order. Other row groups are not read."""
        wanted = np.unique(np.asarray(places, np.int64))
        parts: list[pa.RecordBatch] = []
        with self._open(path) as file:
            try:
                end = 0
                for group in range(file.num_row_groups):
                    start, end = end, end + file.metadata.row_group(group).num_rows
                    inside = wanted[(start <= wanted) & (wanted < end)]
                    if not len(inside):
                        continue
                    for batch in file.iter_batches(ROWS_PER_BATCH, row_groups=[group], columns=columns):
                        chosen = inside[(start <= inside) & (inside < start + len(batch))] - start
                        parts.append(batch.take(pa.array(chosen)).replace_schema_metadata(None))
                        start += len(batch)
                        if start > inside[-1]:
                            break
            except (pa.ArrowException, OSError) as error:
                raise ArtifactDamaged(f"{path} cannot be read: {error}") from error
        if end <= wanted[-1]:
            raise ArtifactDamaged(f"{path} has {end} rows, and row {wanted[-1]} was expected")
        return pa.concat_batches(parts).take(pa.array(np.searchsorted(wanted, places)))

    def count(self, path: Path) -> int:
        with self._open(path) as file:
            return file.metadata.num_rows

    def _open(self, path: Path) -> pq.ParquetFile:
        try:
            file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise ArtifactDamaged(f"{path} is not a complete Parquet file: {error}") from error
        metadata = file.schema_arrow.metadata or {}
        kind, version = (metadata[key].decode() if key in metadata else None for key in (_KIND, _VERSION))
        if (kind, version) != (self.kind, str(SCHEMA_VERSION)):
            file.close()
            content = "a Parquet file of another program" if kind is None else f"{kind} in schema version {version}"
            raise SchemaMismatch(
                f"{path} holds {content}; expected {self.kind} in schema version {SCHEMA_VERSION}. "
                "Rerun the stage that wrote it with this version of Espalier."
            )
        return file


_TRAJECTORIES = _Table("trajectories", tables.TRAJECTORY_SCHEMA, tables.trajectory_row, decode.trajectories)
_SCORES = _Table("scores", tables.SCORE_SCHEMA, tables.score_row, decode.scores)
_REWARDS = ("trajectory_id", "reward", "step_rewards")
"""Columns of scores that are joined with whole trajectories."""
_SELECTION = _Table("selection", tables.SELECTION_SCHEMA, tables.selection_row, decode.selections)


def write_trajectories(path: Path, rows: Iterable[Trajectory]) -> int:
    """Write all rows in order and return their number. Raises TypeError, with the trajectory's id, if a JSON field is
    not JSON data."""
    return _TRAJECTORIES.write(path, rows)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the rows in the order in which they were written, with a batch in memory at a time.

    Raises SchemaMismatch for another kind of file or schema version, and ArtifactDamaged for an incomplete file, before
    the first row; ArtifactDamaged also if a later part cannot be read.
    """
    return _TRAJECTORIES.read(path)


def count_trajectories(path: Path) -> int:
    """Return the number of rows, from the file's metadata. Raises as read_trajectories."""
    return _TRAJECTORIES.count(path)


def read_failures(path: Path) -> Iterator[tuple[str, Failure]]:
    """Yield the id and the failure of each trajectory that failed; no other column is read. Raises as
    read_trajectories."""
    for batch in _TRAJECTORIES.batches(path, ["id", "failure"]):
        yield from decode.failures(batch)


def write_scores(path: Path, rows: Iterable[Score]) -> int:
    """Write scores, as write_trajectories."""
    return _SCORES.write(path, rows)


def read_scores(path: Path) -> Iterator[Score]:
    """Yield scores, as read_trajectories."""
    return _SCORES.read(path)


def write_selection(path: Path, rows: Iterable[Selection]) -> int:
    """Write a selection, as write_trajectories."""
    return _SELECTION.write(path, rows)


def write_selection_batches(path: Path, batches: Iterable[pa.RecordBatch]) -> int:
    """Write a selection from its columns, and return the number of rows. The file is that of write_selection."""
    return _SELECTION.write_batches(path, batches)


def read_selection(path: Path) -> Iterator[Selection]:
    """Yield a selection, as read_trajectories."""
    return _SELECTION.read(path)


def selection_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the columns of a selection. Raises as read_trajectories."""
    for batch in _SELECTION.batches(path, rows=ROWS_PER_NARROW_BATCH):
        yield batch.replace_schema_metadata(None)


@contextmanager
def scored_writer(folder: Path) -> Iterator[Callable[[Trajectory, Score], None]]:
    """Give a function that appends a trajectory with its score to `trajectories.parquet`, `scores.parquet`, and, as
    selected, `selection.parquet` of a folder. A chunk of rows is in memory at a time; the files appear at the end."""
    chunk: list[tuple[Trajectory, Score]] = []
    with (
        _TRAJECTORIES.writer(folder / "trajectories.parquet") as write_trajectories,
        _SCORES.writer(folder / "scores.parquet") as write_scores,
        _SELECTION.writer(folder / "selection.parquet") as write_decisions,
    ):

        def write_chunk() -> None:
            write_trajectories([trajectory for trajectory, _ in chunk])
            write_scores([score for _, score in chunk])
            write_decisions([Selection(trajectory.id, True, "kept") for trajectory, _ in chunk])
            chunk.clear()

        def add(trajectory: Trajectory, score: Score) -> None:
            chunk.append((trajectory, score))
            if len(chunk) >= ROWS_PER_CHUNK:
                write_chunk()

        yield add
        if chunk:
            write_chunk()


def read_scored(
    trajectories: Path,
    scores: Path,
    selection: Path | None = None,
    *,
    components: bool = False,
) -> Iterator[Trajectory]:
    """Yield trajectories joined with their rewards, with a batch in memory at a time: those that `selection` keeps, or
    all if it is None. A reward of None means unscored. The judge's step rewards, if any, replace the environment's.

    components: also join the scores' components, as metrics. They do not overwrite a metric, or a value of the outcome,
    of the same name: a component is a part of a reward, and has its sign.

    The files are read in parallel: each has one row per trajectory, in the same order, as judge and filter write them.
    Raises ArtifactDamaged, with the file's path, at the first mismatch, and the errors of read_trajectories.
    """
    for batch in scored_batches(trajectories, scores, selection, components=components):
        yield from decode.scored_trajectories(batch)


def load_scored(
    trajectories: Path, scores: Path, selection: Path | None, *, components: bool = False
) -> list[Trajectory]:
    """Return all trajectories of read_scored as a list, for training."""
    return list(read_scored(trajectories, scores, selection, components=components))


def scored_rows(
    trajectories: Path, scores: Path, places: Sequence[int], *, components: bool = False
) -> list[Trajectory]:
    """Return the trajectories of read_scored at these positions, in their order; their row groups only are read."""
    if not len(places):
        return []
    rows = _TRAJECTORIES.at(trajectories, places)
    names = [*_REWARDS, *(["components"] if components else [])]
    score_rows = AlignedRows(scores, iter([_SCORES.at(scores, places, names)]), trajectories)
    return list(decode.scored_trajectories(_joined(rows, score_rows.take(rows.column("id")))))


def score_rows(path: Path, places: Sequence[int]) -> list[Score]:
    """Return the scores at these positions, in their order; their row groups only are read."""
    return list(_SCORES.from_batch(_SCORES.at(path, places)))


def column_batches(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield some columns of a file of trajectories."""
    return _TRAJECTORIES.batches(path, columns, ROWS_PER_NARROW_BATCH)


def scored_batches(
    trajectories: Path,
    scores: Path,
    selection: Path | None = None,
    *,
    columns: Sequence[str] | None = None,
    components: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the columns of read_scored: those of trajectories, with the scores' `reward`, `judged_steps` if
    all columns are read, and `components` if asked for.

    columns: columns of the trajectories, `id` among them; None: all of them, in small batches.
    """
    size = ROWS_PER_BATCH if columns is None else ROWS_PER_NARROW_BATCH
    names = [*(_REWARDS if columns is None else _REWARDS[:2]), *(["components"] if components else [])]
    score_rows = AlignedRows(scores, _SCORES.batches(scores, names, ROWS_PER_NARROW_BATCH), trajectories)
    kept_rows = None
    if selection is not None:
        decisions = _SELECTION.batches(selection, ["trajectory_id", "kept"], ROWS_PER_NARROW_BATCH)
        kept_rows = AlignedRows(selection, decisions, trajectories)
    for batch in _TRAJECTORIES.batches(trajectories, columns, size):
        ids = batch.column("id")
        joined = _joined(batch, score_rows.take(ids))
        yield joined if kept_rows is None else joined.filter(kept_rows.take(ids).column("kept"))
    score_rows.end()
    if kept_rows is not None:
        kept_rows.end()


def _joined(batch: pa.RecordBatch, scores: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns of trajectories with those of their scores."""
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns["reward"] = scores.column("reward")
    for name, column in (("judged_steps", "step_rewards"), ("components", "components")):
        if column in scores.schema.names:
            columns[name] = scores.column(column)
    return pa.RecordBatch.from_pydict(columns)
