"""Episodes of a training in files that are mapped into memory, for algorithms that compare whole episodes.

Each process reads and checks its own share of the episodes and writes them to a file (`mapped_files`). All processes
then have a light object for each episode: its names, policy and reward. The rest is decoded from the files when it is
asked for, and only the latest `ROWS_PER_BATCH * BATCHES_IN_MEMORY` episodes stay decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.algorithms.loop.mapped_files import open_mapped, own_share, write_share
from components.trajectories import decode
from components.trajectories.schema import Trajectory
from components.trajectories.tables import TRAJECTORY_SCHEMA, trajectory_row

FOLDER = "episodes"
"""Folder of the files in the scratch folder of a training."""
ROWS_PER_BATCH = 16
BATCHES_IN_MEMORY = 64
"""Batches whose episodes stay decoded: those of most rounds, so that these are decoded once."""
_SCHEMA = TRAJECTORY_SCHEMA.append(pa.field("place", pa.int64())).append(pa.field("longest", pa.int32()))


class MappedTrajectory(Trajectory):
    """Episode of which a part is in memory. Any other attribute is read from the file when it is asked for; one that is
    assigned stays in memory."""

    __slots__ = ("_decoded", "_place", "longest")
    _decoded: Callable[[int, int], list[Trajectory]]
    _place: tuple[int, int, int]
    """File, batch and row."""
    longest: int
    """Number of tokens of the longest history."""

    def __getattr__(self, name: str) -> Any:  # called for slots without a value
        if name not in Trajectory.__slots__:
            raise AttributeError(name)
        file, batch, row = self._place
        return getattr(self._decoded(file, batch)[row], name)

    def __copy__(self) -> MappedTrajectory:
        """Return a copy with the same part in memory."""
        copy = object.__new__(MappedTrajectory)
        for name in (*Trajectory.__slots__, *MappedTrajectory.__slots__):
            with suppress(AttributeError):
                setattr(copy, name, object.__getattribute__(self, name))
        return copy


def mapped(
    scratch: Path, episodes: Sequence[Trajectory], prepare: Callable[[Trajectory], Trajectory]
) -> list[MappedTrajectory]:
    """Write all episodes to files, and return them in their order. All processes must call this.

    prepare: checks an episode and returns what is written; it is called for the episodes of this process."""
    rows = (_row(place, prepare(episode)) for place, episode in own_share(episodes))
    files = [open_mapped(file) for file in write_share(scratch / FOLDER, _SCHEMA, rows, ROWS_PER_BATCH)]

    @lru_cache(maxsize=BATCHES_IN_MEMORY)
    def decoded(file: int, batch: int) -> list[Trajectory]:
        return list(decode.trajectories(files[file].get_batch(batch)))

    result: dict[int, MappedTrajectory] = {}
    for number, file in enumerate(files):
        for index in range(file.num_record_batches):
            batch = file.get_batch(index)
            places, lengths = batch.column("place").to_pylist(), batch.column("longest").to_pylist()
            for offset, head in enumerate(decode.heads(batch)):
                episode = object.__new__(MappedTrajectory)
                for name, value in head.items():
                    setattr(episode, name, value)
                episode.advantage, episode.longest = None, lengths[offset]
                episode._decoded, episode._place = decoded, (number, index, offset)
                result[places[offset]] = episode
    return [result[place] for place in sorted(result)]


def _row(place: int, episode: Trajectory) -> dict[str, Any]:
    longest = max((len(history.token_ids) for history in episode.histories), default=0)
    return {**trajectory_row(episode), "place": place, "longest": longest}
