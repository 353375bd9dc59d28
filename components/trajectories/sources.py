"""Collections that are read as columns, as often as needed: from files, or from trajectories in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.trajectories.columns import Array, EpisodeColumns
from components.trajectories.decode import texts
from components.trajectories.groups import not_adjacent, scenario_of
from components.trajectories.reads import COLUMNS, COMPONENTS, MEASURES, WHOLE, Reads
from components.trajectories.schema import Trajectory
from components.trajectories.store import ROWS_PER_BATCH, column_batches, scored_batches

BATCH_EPISODES = 65_536
"""Episodes of a batch without whole trajectories; a batch is longer if its last group is."""


class Source(Protocol):
    """A collection that can be read several times."""

    @property
    def whole(self) -> Source:
        """The collection of which this is a part; itself if it is no part."""
        ...

    def read(self, reads: Reads) -> Iterator[EpisodeColumns]:
        """Yield the collection from its start, in batches of whole groups with these columns. Raises ArtifactError if
        the episodes of a group are not adjacent."""
        ...


@dataclass(frozen=True)
class InMemory:
    """A collection of trajectories that carry their rewards."""

    rows: Sequence[Trajectory]

    @property
    def whole(self) -> InMemory:
        return self

    def read(self, reads: Reads) -> Iterator[EpisodeColumns]:
        if self.rows:
            episodes = EpisodeColumns.of(self.rows)
            _add_groups(episodes, set())
            yield episodes


@dataclass(frozen=True)
class ScoredFiles:
    """A collection of trajectories in a file, with their scores in another."""

    trajectories: Path
    scores: Path

    @classmethod
    def of(cls, folder: Path) -> ScoredFiles:
        """Return the collection of an artifact that holds both files."""
        return cls(folder / "trajectories.parquet", folder / "scores.parquet")

    @property
    def whole(self) -> ScoredFiles:
        return self

    def read(self, reads: Reads) -> Iterator[EpisodeColumns]:
        return _whole_groups(self._batches(reads), ROWS_PER_BATCH if WHOLE in reads else BATCH_EPISODES)

    def load(self) -> EpisodeColumns:
        """Return all episodes with the columns of `components.evaluation.metrics`; groups need not be adjacent."""
        batches = list(self._batches(MEASURES))
        return EpisodeColumns(pa.concat_batches(batches)) if batches else EpisodeColumns.of([])

    def _batches(self, reads: Reads) -> Iterator[pa.RecordBatch]:
        whole = WHOLE in reads
        columns = None if whole else _columns(reads)
        return scored_batches(self.trajectories, self.scores, columns=columns, components=whole or COMPONENTS in reads)


def read_unscored(trajectories: Path, reads: Reads) -> Iterator[EpisodeColumns]:
    """Yield the episodes of a file in batches with these columns; their groups need not be whole, and have no reward
    but that of the file."""
    for batch in column_batches(trajectories, [*_columns(reads), "reward"]):
        yield EpisodeColumns(batch)


def _columns(reads: Reads) -> list[str]:
    """Return the columns of the trajectories' file."""
    return [*COLUMNS[""], *(name for read in sorted(reads) for name in COLUMNS[read])]


@dataclass(frozen=True)
class Scenarios:
    """The scenarios of a collection whose first row is in [first, end). A scenario, with the groups that were played
    aside, is never split. Rows after the last of these scenarios are not decoded."""

    source: Source
    first: int
    end: int

    @property
    def whole(self) -> Source:
        return self.source.whole

    def read(self, reads: Reads) -> Iterator[EpisodeColumns]:
        start, scenario, inside = 0, "", False
        for episodes in self.source.read(reads):
            taken: list[Array] = []
            bounds = [*episodes.first_G.tolist(), len(episodes)]
            names = episodes.groups.take(pa.array(bounds[:-1])).to_pylist()
            for name, low, high in zip(names, bounds, bounds[1:], strict=False):
                if scenario_of(name) != scenario:
                    scenario, inside = scenario_of(name), self.first <= start + low < self.end
                if inside:
                    taken.append(np.arange(low, high))
            if taken:
                yield episodes.take(np.concatenate(taken))
            start += len(episodes)
            if start >= self.end and not inside:
                return


def _whole_groups(batches: Iterable[pa.RecordBatch], episodes: int) -> Iterator[EpisodeColumns]:
    """Yield batches of whole groups, of about this number of episodes, from batches of any size. Raises ArtifactError
    if a group occurs again later: it would be split."""
    finished: set[str] = set()
    held: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        held.append(batch)
        count += len(batch)
        if count >= episodes:
            joined = pa.concat_batches(held)
            start = _last_group(joined)
            if start:
                yield _add_groups(EpisodeColumns(joined.slice(0, start)), finished)
            held, count = [joined.slice(start)], len(joined) - start
    if count:
        yield _add_groups(EpisodeColumns(pa.concat_batches(held)), finished)


def _last_group(batch: pa.RecordBatch) -> int:
    """Return the position of the first episode of the last group of a batch."""
    groups = batch.column("scenario").field("id")
    others = pc.indices_nonzero(pc.not_equal(groups, groups[-1]))
    return others[-1].as_py() + 1 if len(others) else 0


def _add_groups(episodes: EpisodeColumns, finished: set[str]) -> EpisodeColumns:
    """Add the groups of the episodes to the names of finished groups. Raises ArtifactError for one of these names."""
    firsts = episodes.first_G.tolist()
    for place, name in zip(firsts, episodes.groups.take(pa.array(firsts)).to_pylist(), strict=True):
        if name in finished:
            raise not_adjacent(*texts(pa.array([name, episodes.ids[place].as_py()])))
        finished.add(name)
    return episodes
