"""Finished episodes of an unfinished stage, on disk: a stage holds none of them in memory, and a retry resumes."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, overload

from components.json_text import read_json
from components.trajectories.schema import Trajectory

log = logging.getLogger(__name__)

Row = TypeVar("Row")

FLUSH_SECONDS = 0.1
"""Maximum delay until a finished row is on disk, in seconds."""
FLUSH_ROWS = 4096
"""Maximum number of rows in memory."""
FAILED = "failed"
"""Name of the shards of failed episodes: data of the finished stage, but a retry of the stage runs them again."""
MOST_ROWS = 2048
"""Maximum number of rows of shards that a reader holds, unless a single shard has more."""


class FinishedEpisodes:
    """Finished episodes of a stage, in shards in its scratch folder as they finish."""

    def __init__(self, folder: Path):
        self.seconds: dict[str, float] = {}
        """Wall-clock time of each episode, in seconds."""
        for path in folder.glob(f"{FAILED}-*.parquet"):
            path.unlink()
        self._places: dict[str, tuple[Path, int]] = {}
        """Shard and row of each episode by id; of two with one id, the later one."""
        self._shards = FinishedRows(folder, "episodes", self._write, self._read)
        self._failed = FinishedRows(folder, FAILED, self._write, self._read)
        self._rows = _ShardRows()
        for _ in self._shards.read():  # `_read` records the places of all rows
            pass
        self.finished: Mapping[str, Trajectory] = _Finished(self, dict(self._places))
        """Episodes of earlier attempts, by id, read when they are asked for."""

    def add(self, trajectory: Trajectory, seconds: float) -> None:
        """Add a finished episode."""
        self.seconds[trajectory.id] = seconds
        (self._shards if trajectory.failure is None else self._failed).add([trajectory])

    def flush(self) -> None:
        """Write the pending episodes."""
        self._shards.flush()
        self._failed.flush()

    def read(self, ids: Sequence[str]) -> StoredEpisodes:
        """Return episodes in this order, after `flush`."""
        return StoredEpisodes(self, ids)

    def row(self, place: tuple[Path, int]) -> Trajectory:
        return self._rows.read(*place)

    def place(self, trajectory_id: str) -> tuple[Path, int]:
        return self._places[trajectory_id]

    def _write(self, path: Path, trajectories: Sequence[Trajectory]) -> None:
        from components.trajectories.store import write_trajectories

        times = {trajectory.id: self.seconds[trajectory.id] for trajectory in trajectories}
        path.with_suffix(".json").write_text(json.dumps(times))  # first, so that each existing shard has its times
        write_trajectories(path, trajectories)
        self._places.update({trajectory.id: (path, row) for row, trajectory in enumerate(trajectories)})

    def _read(self, path: Path) -> Iterator[Trajectory]:
        from components.trajectories.store import read_trajectories

        ids = []
        for trajectory in read_trajectories(path):
            ids.append(trajectory.id)
            yield trajectory
        seconds = read_json(path.with_suffix(".json"))
        if not isinstance(seconds, dict) or not all(
            isinstance(seconds.get(name), int | float) and math.isfinite(seconds[name]) for name in ids
        ):
            raise ValueError(f"{path.with_suffix('.json')}: expected the seconds of each episode")
        self.seconds.update({name: seconds[name] for name in ids})
        self._places.update({name: (path, row) for row, name in enumerate(ids)})


class StoredEpisodes(Sequence[Trajectory]):
    """Episodes on disk, in order. Each pass reads them again, a few shards at a time; a change of an episode is lost
    with it, so changes are declared (`changed`)."""

    def __init__(
        self, episodes: FinishedEpisodes, ids: Sequence[str], change: Callable[[Trajectory], Trajectory] | None = None
    ):
        self._episodes = episodes
        self._ids = ids
        self._change = change or (lambda trajectory: trajectory)

    def changed(self, change: Callable[[Trajectory], Trajectory]) -> StoredEpisodes:
        """Return the episodes with a change that is made whenever one is read."""
        return StoredEpisodes(self._episodes, self._ids, lambda trajectory: change(self._change(trajectory)))

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Trajectory]:
        return (self._read(name) for name in self._ids)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> StoredEpisodes: ...

    def __getitem__(self, index: int | slice) -> Trajectory | StoredEpisodes:
        if isinstance(index, slice):
            return StoredEpisodes(self._episodes, self._ids[index], self._change)
        return self._read(self._ids[index])

    def _read(self, name: str) -> Trajectory:
        return self._change(self._episodes.row(self._episodes.place(name)))


@dataclass(frozen=True)
class _Finished(Mapping[str, Trajectory]):
    """Episodes of earlier attempts."""

    episodes: FinishedEpisodes
    places: Mapping[str, tuple[Path, int]]

    def __getitem__(self, name: str) -> Trajectory:
        return self.episodes.row(self.places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class _ShardRows:
    """Rows of the shards that were read last. Episodes that are read in order finished at about the same time, so few
    shards are read twice."""

    def __init__(self) -> None:
        self._shards: OrderedDict[Path, list[Trajectory]] = OrderedDict()

    def read(self, path: Path, row: int) -> Trajectory:
        from components.trajectories.store import read_trajectories

        if path not in self._shards:
            self._shards[path] = list(read_trajectories(path))
            while len(self._shards) > 1 and sum(map(len, self._shards.values())) > MOST_ROWS:
                self._shards.popitem(last=False)
        self._shards.move_to_end(path)
        return self._shards[path][row]


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
