"""Scored episodes of an artifact, from which a page shows a few: columns of all, whole trajectories of those few.

`StoredTrajectories` is a sequence of trajectories that are in files. What is measured on all of them is read as
columns; a trajectory is read when it is asked for. `episodes_of` gives trajectories in memory the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.trajectories import decode, store
from components.trajectories.columns import Array, EpisodeColumns
from components.trajectories.decode import texts
from components.trajectories.schema import Failure, Scenario, Score, Trajectory
from components.trajectories.sources import ScoredFiles


class ScoredEpisodes(Protocol):
    """Scored episodes, in order."""

    @property
    def columns(self) -> EpisodeColumns:
        """All episodes with the columns of `components.evaluation.metrics`."""
        ...

    def rows(self, places: Sequence[int]) -> list[Trajectory]:
        """Return the trajectories at these positions, in their order."""
        ...

    def scenarios(self) -> dict[str, Scenario]:
        """Return the scenario of each group; of the last episode, where they differ."""
        ...

    def failures(self) -> dict[str, Failure]:
        """Return the failure of each failed episode by id."""
        ...

    def message_counts_N(self) -> Array:
        """(N,) number of messages."""
        ...

    def finish_reasons(self) -> list[str | None]:
        """(N,) finish reason of the last message of the assistant; None without one."""
        ...


@dataclass(frozen=True)
class InMemoryEpisodes:
    """Trajectories in memory."""

    trajectories: Sequence[Trajectory]

    @cached_property
    def columns(self) -> EpisodeColumns:
        return EpisodeColumns.of(self.trajectories)

    def rows(self, places: Sequence[int]) -> list[Trajectory]:
        return [self.trajectories[place] for place in places]

    def scenarios(self) -> dict[str, Scenario]:
        return {trajectory.group: trajectory.scenario for trajectory in self.trajectories}

    def failures(self) -> dict[str, Failure]:
        return {item.id: item.failure for item in self.trajectories if item.failure is not None}

    def message_counts_N(self) -> Array:
        counts = [sum(len(history.messages) for history in item.histories) for item in self.trajectories]
        return np.array(counts, np.int64)

    def finish_reasons(self) -> list[str | None]:
        return [_finish_reason(trajectory) for trajectory in self.trajectories]


class StoredTrajectories(Sequence[Trajectory]):
    """Episodes in the files of an artifact, with their scores as `components.trajectories.store.read_scored`."""

    def __init__(self, folder: Path):
        """folder: holds `trajectories.parquet` and `scores.parquet`, which must not change."""
        self._files = ScoredFiles.of(folder)

    @cached_property
    def columns(self) -> EpisodeColumns:
        return self._files.load()

    @cached_property
    def scores(self) -> Mapping[str, Score]:
        """Scores by trajectory id; each is read when it is asked for."""
        return StoredScores(self._files.scores, self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[Trajectory]:
        return store.read_scored(self._files.trajectories, self._files.scores)

    @overload
    def __getitem__(self, place: int) -> Trajectory: ...
    @overload
    def __getitem__(self, place: slice) -> list[Trajectory]: ...
    def __getitem__(self, place: int | slice) -> Trajectory | list[Trajectory]:
        places = range(len(self))[place]
        return self.rows(places) if isinstance(places, range) else self.rows([places])[0]

    def rows(self, places: Sequence[int]) -> list[Trajectory]:
        return store.scored_rows(self._files.trajectories, self._files.scores, places)

    def scenarios(self) -> dict[str, Scenario]:
        return {
            scenario.id: scenario
            for batch in store.column_batches(self._files.trajectories, ["scenario"])
            for scenario in decode.scenarios(batch.column("scenario"))
        }

    def failures(self) -> dict[str, Failure]:
        return dict(store.read_failures(self._files.trajectories))

    def message_counts_N(self) -> Array:
        batches = store.column_batches(self._files.trajectories, ROLE_COLUMNS)
        return np.concatenate([np.empty(0, np.int64), *map(message_counts_N, batches)])

    def finish_reasons(self) -> list[str | None]:
        batches = store.column_batches(self._files.trajectories, ENDING_COLUMNS)
        return [reason for batch in batches for reason in finish_reasons(batch)]


class StoredScores(Mapping[str, Score]):
    """Scores in a file, by the ids of their episodes."""

    def __init__(self, path: Path, episodes: EpisodeColumns):
        """episodes: columns of the episodes, which have the order of the scores."""
        self._path = path
        self._episodes = episodes

    def __getitem__(self, name: str) -> Score:
        place = self._episodes.place(name)
        if place is None:
            raise KeyError(name)
        return store.score_rows(self._path, [place])[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._episodes.names)

    def __len__(self) -> int:
        return len(self._episodes)


def episodes_of(trajectories: Sequence[Trajectory]) -> ScoredEpisodes:
    """Return trajectories, which may be in files, with their columns."""
    return trajectories if isinstance(trajectories, StoredTrajectories) else InMemoryEpisodes(trajectories)


def _finish_reason(trajectory: Trajectory) -> str | None:
    messages = [message for history in trajectory.histories for message in history.messages]
    answers = [message for message in messages if message.role == "assistant"]
    return answers[-1].finish_reason if answers else None


_MESSAGES = "histories.list.element.messages.list.element"
ROLE_COLUMNS = (f"{_MESSAGES}.role",)
"""Columns that hold the number of messages of each episode."""
ENDING_COLUMNS = (f"{_MESSAGES}.role", f"{_MESSAGES}.finish_reason")
"""Columns that hold how each message ended."""


def message_counts_N(batch: pa.RecordBatch) -> Array:
    """(N,) number of messages of each episode, over all its histories. batch: with ROLE_COLUMNS."""
    return np.diff(_message_offsets(batch))


def finish_reasons(batch: pa.RecordBatch) -> list[str | None]:
    """(N,) finish reason of the last message of the assistant; None without one. batch: with ENDING_COLUMNS."""
    offsets = _message_offsets(batch)
    messages = batch.column("histories").values.field("messages").values
    spoken = pc.indices_nonzero(pc.equal(messages.field("role"), "assistant")).to_numpy()
    last_N = (
        np.searchsorted(spoken, offsets[1:], side="left") - 1
    )  # position in `spoken` of the last one before the end
    has_N = (last_N >= 0) & (np.append(spoken, -1)[last_N] >= offsets[:-1])
    reasons = messages.field("finish_reason").take(pa.array(spoken[last_N[has_N]])).fill_null("")
    known = iter(texts(reasons))
    return [(next(known) or None) if has else None for has in has_N.tolist()]


def _message_offsets(batch: pa.RecordBatch) -> Array:
    """(N + 1,) positions of the first message of each episode in the column of all messages, and of the end."""
    histories = batch.column("histories")
    return histories.values.field("messages").offsets.to_numpy()[histories.offsets.to_numpy()]
