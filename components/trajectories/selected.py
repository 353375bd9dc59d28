"""Scored and selected episodes of one or several collections, in files: training data that need not fit into memory.

A pass decodes a batch of rows at a time; several processes can share a pass, each of which decodes its own batches. A
single episode is read with its row group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from components.trajectories import decode, store
from components.trajectories.columns import Array, EpisodeColumns
from components.trajectories.groups import separate
from components.trajectories.schema import Trajectory
from components.trajectories.streamed import StreamedTrajectories


@dataclass(frozen=True)
class SelectedFiles:
    """Files of one collection."""

    trajectories: Path
    scores: Path
    selection: Path | None
    """Selection; None: all episodes."""


class SelectedTrajectories(StreamedTrajectories):
    """Episodes of `store.read_scored`, of one collection after the other. Groups of a scenario that several collections
    share are separate (`groups.separate`).

    components: join the components of the scores as metrics.
    """

    def __init__(self, collections: Sequence[SelectedFiles], *, components: bool = False):
        self._collections = collections
        self._components = components

    def share(self, rank: int, size: int) -> Iterator[tuple[int, Trajectory]]:
        place = number = 0
        for index, files in enumerate(self._collections):
            for batch in store.scored_batches(
                files.trajectories, files.scores, files.selection, components=self._components
            ):
                if number % size == rank:
                    for offset, trajectory in enumerate(decode.scored_trajectories(batch)):
                        yield place + offset, self._finished(trajectory, index)
                place += len(batch)
                number += 1

    def heads(self) -> Iterator[Trajectory]:
        for index, files in enumerate(self._collections):
            for batch in store.scored_batches(
                files.trajectories, files.scores, files.selection, columns=decode.HEAD_COLUMNS
            ):
                yield from (self._finished(head, index) for head in decode.head_trajectories(batch))

    def __len__(self) -> int:
        return sum(map(len, self._rows))

    def _at(self, place: int) -> Trajectory:
        for index, (files, rows) in enumerate(zip(self._collections, self._rows, strict=True)):
            if place < len(rows):
                [trajectory] = store.scored_rows(
                    files.trajectories, files.scores, [rows[place]], components=self._components
                )
                return self._finished(trajectory, index)
            place -= len(rows)
        raise IndexError(place)

    def _finished(self, trajectory: Trajectory, collection: int) -> Trajectory:
        if trajectory.group in self._earlier_groups[collection]:
            trajectory = separate(trajectory, f"@+{collection}")
        return trajectory

    @cached_property
    def _rows(self) -> list[Array]:
        """Rows of the selected episodes in the file of each collection."""
        return [_selected_rows(files) for files in self._collections]

    @cached_property
    def _earlier_groups(self) -> list[set[str]]:
        """Groups of the selected episodes in the collections before each collection."""
        groups: list[set[str]] = [set()]
        for files in self._collections[:-1]:
            batches = store.scored_batches(
                files.trajectories, files.scores, files.selection, columns=["id", "scenario.id"]
            )
            groups.append(groups[-1].union(*(EpisodeColumns(batch).group_names for batch in batches)))
        return groups


def _selected_rows(files: SelectedFiles) -> Array:
    if files.selection is None:
        return np.arange(store.count_trajectories(files.trajectories))
    masks = [batch.column("kept").to_numpy(zero_copy_only=False) for batch in store.selection_batches(files.selection)]
    return np.flatnonzero(np.concatenate([np.empty(0, bool), *masks]))
