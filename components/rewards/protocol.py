"""The reward protocol: a function of one trajectory, or of a group.

The short form is any callable `(trajectory) -> float`. The full form returns `Score`s for a whole group, compared
with each other: a class with a method `score_group`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from components.models.spec import ModelSpec
from components.trajectories.schema import Score, Trajectory


class Reward(Protocol):
    def __call__(self, trajectory: Trajectory) -> float: ...


@runtime_checkable
class GroupReward(Protocol):
    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """One score for each trajectory of one scenario, in the same order."""
        ...


@runtime_checkable
class ModelReward(Protocol):
    """A reward that computes with a model. A reward that is made of others hands the word on to them."""

    def use(self, cache: Path, model: ModelSpec) -> None:
        """Told before the first score: the folder of converted weights, and the model whose episodes are judged."""
        ...
