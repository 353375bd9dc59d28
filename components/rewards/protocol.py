"""The reward protocol: a function of one trajectory, or of a group.

The short form is any callable `(trajectory) -> float`. The full form returns `Score`s for a whole group, compared
with each other: a class with a method `score_group`.

A reward that waits, for a judge behind a URL, is `async`, or says so by an attribute `blocking = True`; then it runs
in threads. Of either, several judgements are under way at once (`judge.concurrency`). Any other reward is asked one
judgement after the other, in the main thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from components.models.spec import ModelSpec
from components.trajectories.schema import Score, Trajectory


class Reward(Protocol):
    def __call__(self, trajectory: Trajectory) -> float | Awaitable[float]: ...


@runtime_checkable
class GroupReward(Protocol):
    def score_group(self, group: Sequence[Trajectory]) -> list[Score] | Awaitable[list[Score]]:
        """One score for each trajectory of one scenario, in the same order."""
        ...


@runtime_checkable
class ModelReward(Protocol):
    """A reward that computes with a model. A reward that is made of others hands the word on to them."""

    def use(self, cache: Path, model: ModelSpec) -> None:
        """Told before the first score: the folder of converted weights, and the model whose episodes are judged."""
        ...
