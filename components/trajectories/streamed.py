"""Episodes that are read in passes, so that a training need not hold them in memory.

Several processes can share a pass, each of which reads its own episodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import overload

import numpy as np

from components.trajectories.schema import Trajectory


class StreamedTrajectories(Sequence[Trajectory], ABC):
    """Episodes that are read whenever they are asked for."""

    @abstractmethod
    def share(self, rank: int, size: int) -> Iterator[tuple[int, Trajectory]]:
        """Yield the episodes that process `rank` of `size` reads, with their positions."""

    @abstractmethod
    def heads(self) -> Iterable[Trajectory]:
        """Return each episode with its names, policy, sampling parameters, reward, failure and roles only."""

    @abstractmethod
    def _at(self, place: int) -> Trajectory: ...

    def map(self, change: Callable[[Trajectory], Trajectory]) -> StreamedTrajectories:
        """Return the episodes with a change, which is applied whenever an episode is read."""
        return PickedTrajectories([Pick(self, range(len(self)), change)])

    def __iter__(self) -> Iterator[Trajectory]:
        return _in_order(self.share(0, 1))

    @overload
    def __getitem__(self, place: int) -> Trajectory: ...
    @overload
    def __getitem__(self, place: slice) -> list[Trajectory]: ...
    def __getitem__(self, place: int | slice) -> Trajectory | list[Trajectory]:
        places = range(len(self))[place]
        return self._at(places) if isinstance(places, int) else list(map(self._at, places))


@dataclass(frozen=True)
class Pick:
    """Episodes that are picked from a sequence."""

    episodes: Sequence[Trajectory]
    places: Sequence[int]
    """Positions in the sequence, in the order of the result."""
    change: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory
    """Function that is applied whenever an episode is read, and to its head."""

    def read(self, numbered: Iterable[tuple[int, Trajectory]]) -> Iterator[tuple[int, Trajectory]]:
        """Yield the picked ones of episodes with their positions in the sequence, with those in the result."""
        numbers = np.full(len(self.episodes), -1)
        numbers[self.places] = np.arange(len(self.places))
        for place, trajectory in numbered:
            if (number := int(numbers[place])) >= 0:
                yield number, self.change(trajectory)


class PickedTrajectories(StreamedTrajectories):
    """Episodes that are picked from several sequences, those of one after those of the other."""

    def __init__(self, picks: Sequence[Pick]):
        self._picks = [pick for pick in picks if pick.places]

    def share(self, rank: int, size: int) -> Iterator[tuple[int, Trajectory]]:
        first = 0
        for pick in self._picks:
            for number, trajectory in pick.read(share(pick.episodes, rank, size)):
                yield first + number, trajectory
            first += len(pick.places)

    def heads(self) -> Iterator[Trajectory]:
        for pick in self._picks:
            yield from _in_order(pick.read(enumerate(heads(pick.episodes))))

    def __len__(self) -> int:
        return sum(len(pick.places) for pick in self._picks)

    def _at(self, place: int) -> Trajectory:
        for pick in self._picks:
            if place < len(pick.places):
                return pick.change(pick.episodes[pick.places[place]])
            place -= len(pick.places)
        raise IndexError(place)


def share(episodes: Sequence[Trajectory], rank: int, size: int) -> Iterable[tuple[int, Trajectory]]:
    """Return the episodes that process `rank` of `size` reads, with their positions."""
    if isinstance(episodes, StreamedTrajectories):
        return episodes.share(rank, size)
    return islice(enumerate(episodes), rank, None, size)


def heads(episodes: Sequence[Trajectory]) -> Iterable[Trajectory]:
    """Return the episodes; of streamed ones, what `StreamedTrajectories.heads` says."""
    return episodes.heads() if isinstance(episodes, StreamedTrajectories) else episodes


def _in_order(numbered: Iterable[tuple[int, Trajectory]]) -> Iterator[Trajectory]:
    """Yield episodes that are numbered from 0 in the order of their numbers; those that come early are in memory."""
    early: dict[int, Trajectory] = {}
    number = 0
    for place, trajectory in numbered:
        early[place] = trajectory
        while number in early:
            yield early.pop(number)
            number += 1
