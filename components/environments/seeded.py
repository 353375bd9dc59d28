"""Scenarios from a seed, for environments that make their own tasks; and the games that are made so.

The held-out tasks are drawn first, so that they stay the same whatever `train` is. A task that was drawn before, in
either split, is drawn again: no task occurs twice.
"""

from __future__ import annotations

import abc
import functools
import json
import random
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field

from components.environments.scenario_counts import Count
from components.environments.tools import TextEnvironment
from components.trajectories.schema import Scenario

Difficulty = Annotated[int, Field(ge=1, le=5)]
Difficulties = Annotated[Sequence[Difficulty], Field(min_length=1)]
ALL = (1, 2, 3, 4, 5)
MOST_TRIES = 1000
"""Draws of one task before there are held to be no more."""

Make = Callable[[random.Random, int, str], tuple[str, dict[str, Any]]]
"""Draws a task of a difficulty for a split: its type and its input."""


@functools.lru_cache(maxsize=16)  # a collector makes many environments of the same scenarios
def generate(
    name: str, make: Make, *, seed: int, train: int, heldout: int, difficulties: tuple[int, ...]
) -> tuple[Scenario, ...]:
    """Scenarios of both splits, the difficulties in turn. Raises ValueError where there are not so many tasks."""
    if not difficulties or not set(difficulties) <= set(ALL):
        raise ValueError(f"difficulties is {list(difficulties)}; expected one or more of {list(ALL)}")
    found: list[Scenario] = []
    seen: set[str] = set()
    for split, count in (("heldout", heldout), ("train", train)):
        for index in range(count):
            difficulty = difficulties[index % len(difficulties)]
            rng = random.Random(f"{name} {seed} {split} {index}")
            for _ in range(MOST_TRIES):
                kind, task = make(rng, difficulty, split)
                key = json.dumps(task, sort_keys=True)
                if key not in seen:
                    break
            else:
                raise ValueError(f"{split} is {count}; there are too few tasks of difficulty {difficulty} for so many")
            seen.add(key)
            found.append(Scenario(f"{name}-{split}-{seed}-{index}", task, split, kind, difficulty))
    return tuple(found)


class GeneratedGame(TextEnvironment):
    """A game of generated scenarios. To be subclassed: with `name`, `task`, and what a `TextEnvironment` needs."""

    name: str
    """With which the ids of its scenarios begin."""

    @staticmethod
    @abc.abstractmethod
    def task(rng: random.Random, difficulty: int, split: str) -> tuple[str, dict[str, Any]]:
        """Draws a task of a difficulty: its type and its input."""

    def __init__(self, seed: int = 0, train: Count = 512, heldout: Count = 128, difficulties: Difficulties = ALL):
        self._scenarios = generate(
            self.name, self.task, seed=seed, train=train, heldout=heldout, difficulties=tuple(difficulties)
        )

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return [scenario for scenario in self._scenarios if scenario.split == split]
