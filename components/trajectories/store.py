"""The store of trajectories, scores and selections: Parquet files, lossless, written and read as streams.

`components.trajectories.tables` defines the row format; this module owns the files. A file's metadata contain its kind
and schema version, which are checked before the first row is read. Files are written atomically: an interrupted writer
leaves no partial file under the final name. Equal rows give equal bytes, so equal data have equal artifact digests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
"""Rows per conversion to columns in a writer."""
GROUP_BYTES = 16 * 2**20
"""Size in memory from which columns are written as a row group. Each row group adds 40 KB to the footer, which readers
hold in memory."""
ROWS_PER_BATCH = 64
"""Rows per conversion to objects in a reader."""

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
        metadata = {_KIND: self.kind.encode(), _VERSION: str(SCHEMA_VERSION).encode()}
        schema = self.schema.with_metadata(metadata)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        group: list[pa.RecordBatch] = []
        try:
            with pq.ParquetWriter(part, schema, compression="zstd") as file:

                def write(rows: Sequence[Row]) -> int:
                    group.append(pa.RecordBatch.from_pylist([self.to_row(row) for row in rows], schema=schema))
                    if sum(batch.nbytes for batch in group) >= GROUP_BYTES:
                        file.write_table(pa.Table.from_batches(group))
                        group.clear()
                    return len(rows)

                yield write
                if group:
                    file.write_table(pa.Table.from_batches(group))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def read(self, path: Path) -> Iterator[Row]:
        for batch in self.batches(path):
            yield from self.from_batch(batch)

    def batches(self, path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        with self._open(path) as file:
            try:
                for group in range(file.num_row_groups):  # one reader for all groups would retain 2 KB per row read
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


_TRAJECTORIES = _Table("trajectories", tables.TRAJECTORY_SCHEMA, tables.trajectory_row, tables.trajectories)
_SCORES = _Table("scores", tables.SCORE_SCHEMA, tables.score_row, tables.scores)
_SELECTION = _Table("selection", tables.SELECTION_SCHEMA, tables.selection_row, tables.selections)


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
        yield from tables.failures(batch)


def write_scores(path: Path, rows: Iterable[Score]) -> int:
    """Write scores, as write_trajectories."""
    return _SCORES.write(path, rows)


def read_scores(path: Path) -> Iterator[Score]:
    """Yield scores, as read_trajectories."""
    return _SCORES.read(path)


def write_selection(path: Path, rows: Iterable[Selection]) -> int:
    """Write a selection, as write_trajectories."""
    return _SELECTION.write(path, rows)


def read_selection(path: Path) -> Iterator[Selection]:
    """Yield a selection, as read_trajectories."""
    return _SELECTION.read(path)


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
    trajectories: Path, scores: Path, selection: Path | None = None, *, components: bool = False
) -> Iterator[Trajectory]:
    """Yield trajectories joined with their rewards, with a batch in memory at a time: those that `selection` keeps, or
    all if it is None. A reward of None means unscored. The judge's step rewards, if any, replace the environment's.

    components: also join the scores' components, as metrics. They do not overwrite a metric, or a value of the outcome,
    of the same name: a component is a part of a reward, and has its sign.

    The files are read in parallel: each has one row per trajectory, in the same order, as judge and filter write them.
    Raises ArtifactDamaged, with the file's path, at the first mismatch, and the errors of read_trajectories.
    """
    rewards = _AlignedReader(scores, _rewards(scores, components), trajectories)
    selected = None
    if selection is not None:
        selected = _AlignedReader(
            selection, ((item.trajectory_id, item.kept) for item in read_selection(selection)), trajectories
        )
    for trajectory in read_trajectories(trajectories):
        trajectory.reward, judged_steps, parts = rewards.take(trajectory.id)
        if judged_steps:
            trajectory.step_rewards = judged_steps
        new = {name: value for name, value in parts.items() if name not in trajectory.outcome}
        trajectory.metrics = {**new, **trajectory.metrics}
        if selected is None or selected.take(trajectory.id):
            yield trajectory
    rewards.end()
    if selected is not None:
        selected.end()


def load_scored(
    trajectories: Path, scores: Path, selection: Path | None, *, components: bool = False
) -> list[Trajectory]:
    """Return all trajectories of read_scored as a list, for training."""
    return list(read_scored(trajectories, scores, selection, components=components))


_Reward = tuple[float | None, list[float], dict[str, float]]


def _rewards(path: Path, components: bool) -> Iterator[tuple[str, _Reward]]:
    columns = ["trajectory_id", "reward", "step_rewards", *(["components"] if components else [])]
    for batch in _SCORES.batches(path, columns):
        for name, reward, steps, parts in tables.rewards(batch):
            yield name, (reward, steps, parts)


Value = TypeVar("Value")


class _AlignedReader(Generic[Value]):
    """A reader of one value per trajectory, in the order of the trajectories file."""

    def __init__(self, path: Path, pairs: Iterator[tuple[str, Value]], trajectories: Path):
        self.path = path
        self._pairs = pairs
        self._trajectories = trajectories

    def take(self, trajectory_id: str) -> Value:
        """Return the next trajectory's value. Raises ArtifactDamaged if the next row is for another trajectory."""
        for row_id, value in self._pairs:
            if row_id == trajectory_id:
                return value
            raise self._mismatch(f"{row_id} stands where {trajectory_id} should")
        raise self._mismatch(f"it ends before {trajectory_id}")

    def end(self) -> None:
        """Raise ArtifactDamaged if there are further rows."""
        for row_id, _ in self._pairs:
            raise self._mismatch(f"{row_id} comes after the last trajectory")

    def _mismatch(self, detail: str) -> ArtifactDamaged:
        return ArtifactDamaged(f"{self.path} was not made from {self._trajectories}: {detail}")
