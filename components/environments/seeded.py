"""Scenarios generated from a seed, their numbers, and the base class of games that use them.

Held-out tasks are drawn first, so they do not depend on `train`. Duplicates within or across splits are redrawn: every
task is unique.
"""

from __future__ import annotations

import abc
import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from components.environments.restorable import RestorableState
from components.environments.tools import TextEnvironment, ToolEnvironment
from components.trajectories.schema import Scenario

MOST_SCENARIOS = 1_000_000
"""Maximum number of scenarios of a split; all of them are in memory at once."""
Count = Annotated[int, Field(ge=1, le=MOST_SCENARIOS)]
"""Number of scenarios of a split."""
CountOrNone = Annotated[int, Field(ge=0, le=MOST_SCENARIOS)]
"""0 leaves the split empty, for example if nothing is trained."""
Difficulty = Annotated[int, Field(ge=1, le=5)]
Difficulties = Annotated[Sequence[Difficulty], Field(min_length=1)]
ALL = (1, 2, 3, 4, 5)
MOST_TRIES = 1000
"""Maximum number of draws for one unique task."""

Make = Callable[[random.Random, int, str], tuple[str, dict[str, Any]]]
"""Function that draws a task of a given difficulty for a split; returns its type and its input."""


@functools.lru_cache(maxsize=16)  # a collector creates many environments with the same scenarios
def generate(
    name: str,
    make: Make,
    seed: int,
    train: int,
    heldout: int,
    difficulties: tuple[int, ...],
    possible: tuple[int, ...] = ALL,
) -> tuple[Scenario, ...]:
    """Return the scenarios of both splits, cycling through the difficulties. possible: the accepted difficulties.

    Raises ValueError if there are too few distinct tasks.
    """
    if not difficulties or not set(difficulties) <= set(possible):
        raise ValueError(f"difficulties = {list(difficulties)}: expected one or more of {list(possible)}")
    scenarios: list[Scenario] = []
    keys: set[str] = set()
    for split, count in (("heldout", heldout), ("train", train)):
        for index in range(count):
            difficulty = difficulties[index % len(difficulties)]
            rng = random.Random(f"{name} {seed} {split} {index}")
            for _ in range(MOST_TRIES):
                kind, task = make(rng, difficulty, split)
                key = json.dumps(task, sort_keys=True)
                if key not in keys:
                    break
            else:
                raise ValueError(
                    f"{split} = {count}: there are too few distinct tasks of difficulty {difficulty}; "
                    f"set a smaller {split}"
                )
            keys.add(key)
            scenarios.append(Scenario(f"{name}-{split}-{seed}-{index}", task, split, kind, difficulty))
    return tuple(scenarios)


def scenario_numbers(counts: Mapping[str, int], split: str) -> range:
    """Return the numbers of the scenarios of a split; those of `heldout` come first, so they do not depend on the size
    of `train`."""
    first = {"heldout": 0, "train": counts["heldout"]}.get(split, 0)
    return range(first, first + counts.get(split, 0))


class GeneratedScenarios(ToolEnvironment):
    """Base class of environments with generated scenarios: subclasses define `name` and `task`."""

    name: ClassVar[str]
    """Prefix of the scenario ids."""
    possible: ClassVar[tuple[int, ...]] = ALL
    """Accepted difficulties."""

    @staticmethod
    @abc.abstractmethod
    def task(rng: random.Random, difficulty: int, split: str) -> tuple[str, dict[str, Any]]:
        """Draw a task of a given difficulty; return its type and its input."""

    def __init__(self, seed: int = 0, train: Count = 512, heldout: Count = 128, difficulties: Difficulties = ALL):
        self._scenarios = generate(self.name, self.task, seed, train, heldout, tuple(difficulties), self.possible)


class GeneratedGame(TextEnvironment, GeneratedScenarios, RestorableState):
    """Base class of games: subclasses define `name`, `task`, `saved`, and the abstract methods of `TextEnvironment`."""
