"""Diversity of imported episodes: their number and success by environment, their types, and their lengths.

The environment of an episode is the first part of its task type: `webshop` of `webshop/books`. Memory is bounded: some
names, and some bytes for each episode.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from components.trajectories.schema import Trajectory

MOST_TYPES = 1000
"""Number of types that are counted by name."""
OTHERS = "others"
UNTYPED = "no type"
QUANTILES = {"min": 0, "median": 50, "p90": 90, "max": 100}


@dataclass
class Diversity:
    """Counts of the trajectories of an import."""

    types: Counter[str] = field(default_factory=Counter)
    """Trajectories by task type."""
    successes: Counter[str] = field(default_factory=Counter)
    """Successful ones of these."""
    turns: array[int] = field(default_factory=lambda: array("I"))
    """Assistant messages of each trajectory."""
    characters: array[int] = field(default_factory=lambda: array("I"))
    """Characters of each trajectory."""

    def add(self, trajectory: Trajectory) -> None:
        """Count a trajectory."""
        name = trajectory.scenario.type or UNTYPED
        name = name if name in self.types or len(self.types) < MOST_TYPES else OTHERS
        self.types[name] += 1
        self.successes[name] += trajectory.success
        messages = [message for history in trajectory.histories for message in history.messages]
        self.turns.append(sum(message.role == "assistant" for message in messages))
        self.characters.append(sum(len(message.content) + len(message.reasoning or "") for message in messages))

    def environments(self) -> dict[str, dict[str, float]]:
        """Return trajectories and success by environment, the most frequent first."""
        counts: Counter[str] = Counter()
        good: Counter[str] = Counter()
        for name, count in self.types.items():
            environment = name.partition("/")[0]
            counts[environment] += count
            good[environment] += self.successes[name]
        return {name: {"trajectories": count, "success": good[name] / count} for name, count in counts.most_common()}

    def effective_types(self) -> float:
        """Return the exponential of the entropy of the types: n equally frequent types are n."""
        total = self.types.total()
        return math.exp(-sum(count / total * math.log(count / total) for count in self.types.values()))

    def to_json(self) -> dict[str, Any]:
        """Return environments and diversity as JSON data."""
        if not self.types:
            return {"environments": {}, "diversity": {}}
        diversity = {"types": dict(self.types.most_common()), "effective_types": round(self.effective_types(), 2)}
        lengths = {"turns": quantiles(self.turns), "characters": quantiles(self.characters)}
        return {"environments": self.environments(), "diversity": diversity | lengths}


def quantiles(values: Sequence[int]) -> dict[str, float]:
    """Return minimum, median, 90th percentile and maximum."""
    return dict(zip(QUANTILES, np.percentile(values, list(QUANTILES.values())).tolist(), strict=True))
