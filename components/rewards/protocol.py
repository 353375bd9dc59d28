"""The reward protocol: a function of one trajectory, or of a group.

The short form is any callable `(trajectory) -> float`; it may return a `Score`. The full form is a class with a method
`score_group`, which returns `Score`s for a whole group of trajectories of one scenario, so it can compare them.

A reward that waits for an external service, such as a judge model behind a URL, is `async` or declares it by an
attribute: `waits = True` if a plain method returns an awaitable, `blocking = True` if the method is to run in threads.
Several of its judgements run concurrently (`judge.concurrency`). Any other reward is called sequentially in the main
thread; as a part of a reward that waits, it runs in a thread beside the event loop.

A reward is also constructed when the configuration is validated. It therefore loads heavy resources in `use`, or at the
first call.

An attribute `highest` states the largest reward that it gives. A threshold above it is then refused.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from components.inference.protocol import ModelEngine
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
        """Return one score for each trajectory of one scenario, in the same order."""
        ...


def _build_uncached(kind: str, recipe: Any, build: Callable[[], T]) -> T:
    return build()


@dataclass(frozen=True)
class RewardResources:
    """Resources that a reward receives before its first score, if it computes with models or asks them."""

    cache: Path
    """Folder of converted weights."""
    model: ModelSpec
    """Policy model whose episodes are judged; it determines device, dtype and maximum episode length."""
    meter: Meter = field(default_factory=Meter)
    """Counter of judge calls and costs; it enforces the budget."""
    answers: Path | None = None
    """Folder of the judge answer cache; None disables the cache."""
    engine: Callable[[ModelSpec | None, Path | None], ModelEngine] | None = None
    """Factory of engines: with a ModelSpec, that model with the PEFT folder of the second argument, if there is one;
    with None, the policy whose episodes are judged."""
    waiting: Callable[[str], None] = log.info
    """Callback for messages about waits that can take hours and have a time limit of their own."""
    keep: Callable[[str, Any, Callable[[], Any]], Any] = _build_uncached
    """Memoizer `(kind, recipe, build)`: returns the cached object of an equal recipe of the same kind, else the result
    of `build`."""


@runtime_checkable
class ModelReward(Protocol):
    """Reward that computes with a model, or asks one. A reward made of other rewards passes `use` on to them."""

    def use(self, resources: RewardResources) -> None:
        """Receive the resources, before the first score."""
        ...


@runtime_checkable
class AskingReward(ModelReward, Protocol):
    """Reward that holds connections or other resources open between questions."""

    def close(self) -> None:
        """Release the resources, after the last score."""
        ...


@runtime_checkable
class ReadingReward(Protocol):
    """Reward that reads fields of the episode, such as the expected answer."""

    def fields_read(self) -> Mapping[str, str]:
        """Return the paths of the fields (`components.rewards.rules.answers`) by the configuration key that names
        them."""
        ...


@runtime_checkable
class Comparing(Protocol):
    """Reward with several sources."""

    def agreement(self, scores: Iterable[Score]) -> dict[str, float]:
        """Return metrics of the agreement between the sources, by name, over all scores of a stage."""
        ...
