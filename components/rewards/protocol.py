"""The reward protocol: a function of one trajectory, or of a group.

The short form is any callable `(trajectory) -> float`; it may return a `Score`. The full form returns `Score`s for a
whole group, compared with each other: a class with a method `score_group`.

A reward that waits, for a judge behind a URL, is `async`, or says so by an attribute: `waits = True` where what it
returns is to be awaited although its method is a plain one, `blocking = True` where it is to run in threads. Several
judgements of it are under way at once (`judge.concurrency`). Any other reward is asked one judgement after the other,
in the main thread; as a part of a reward that waits, in a thread beside the loop.

A reward is built when the configuration is checked, too: what is heavy it loads in `use`, or when it is first asked.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from components.inference.protocol import Engine
from components.models.spec import ModelSpec
from components.rewards.llm.budget import Meter
from components.trajectories.schema import Score, Trajectory

log = logging.getLogger(__name__)

T = TypeVar("T")


class Reward(Protocol):
    def __call__(self, trajectory: Trajectory) -> float | Score | Awaitable[float | Score]: ...


@runtime_checkable
class GroupReward(Protocol):
    def score_group(self, group: Sequence[Trajectory]) -> list[Score] | Awaitable[list[Score]]:
        """One score for each trajectory of one scenario, in the same order."""
        ...


def _built(kind: str, recipe: Any, build: Callable[[], T]) -> T:
    return build()


@dataclass(frozen=True)
class Means:
    """What a reward that computes with models, or asks them, is given before its first score."""

    cache: Path
    """Folder of converted weights."""
    model: ModelSpec
    """Whose episodes are judged; it decides on device, type of numbers and longest episode."""
    meter: Meter = field(default_factory=Meter)
    """Counts what is asked, and says when no more may be."""
    answers: Path | None = None
    """Folder in which answers of judges are kept; None keeps none."""
    engine: Callable[[ModelSpec | None], Engine] | None = None
    """An engine with that model as it is, or, for None, with the policy whose episodes are judged."""
    waiting: Callable[[str], None] = log.info
    """Told what is waited for where that may take hours, and has a limit of its own."""
    keep: Callable[[str, Any, Callable[[], Any]], Any] = _built
    """(kind, recipe, build): what `build` makes, or what an equal recipe of the kind has made before."""


@runtime_checkable
class ModelReward(Protocol):
    """A reward that computes with a model, or asks one. A reward that is made of others hands the word on to them."""

    def use(self, means: Means) -> None:
        """Told before the first score."""
        ...


@runtime_checkable
class AskingReward(ModelReward, Protocol):
    """A reward that holds something open for its questions."""

    def close(self) -> None:
        """Told after the last score."""
        ...


@runtime_checkable
class SettledReward(Protocol):
    """A reward whose scores depend on those before, in the order of the collection. What `score_group` gives is kept
    as it is; then, group after group, kept scores of an earlier try among them, it is settled."""

    settles: bool
    """Whether this one does."""

    def settling(self) -> Callable[[Sequence[Trajectory], Sequence[Score]], list[Score]]:
        """Begins anew: what makes a group's scores of what `score_group` has given for it."""
        ...


@runtime_checkable
class ReadingReward(Protocol):
    """A reward that reads fields of the episode, such as the expected answer."""

    def fields_read(self) -> Mapping[str, str]:
        """Paths of the fields (`components.rewards.rules.answers`) by the key of the configuration that names them."""
        ...


@runtime_checkable
class Comparing(Protocol):
    """A reward with several sources."""

    def agreement(self, scores: Iterable[Score]) -> dict[str, float]:
        """Of all scores of a stage: how far the sources agree, as figures by name."""
        ...
