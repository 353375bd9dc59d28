"""Results over seeds: means with Student-t intervals of the points of a sweep that differ in their seed only.

`seeds: [0, 1, 2]` in an experiment, or on the command line, becomes a sweep over `seed`. Stages that do not sample have
the same key for each seed, so they are computed once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.evaluation.metrics import seeds_interval
from flows.sweeps.points import Point

MEASURES = ("success_start", "success_sft", "success", "gain", "reward", "loss_before", "loss", "accuracy", "seconds")
"""Numbers of the result line that are averaged over seeds, as far as a run has them."""
_SEED = re.compile(r"seed=-?\d+")


@dataclass(frozen=True)
class SeedGroup:
    """Finished points of a sweep that differ in their seed only."""

    overrides: list[str]
    """Their common overrides."""
    seeds: list[int]
    measures: dict[str, dict[str, Any]]
    """Mean, 95 % interval (`low`, `high`; None with one seed) and number of seeds (`n`), by MEASURES."""

    def to_json(self) -> dict[str, Any]:
        """Return the group as JSON data."""
        return {"overrides": self.overrides, "seeds": self.seeds, **self.measures}


def over_seeds(points: Sequence[Point]) -> list[SeedGroup]:
    """Return the groups of finished points that differ in their seed only, in the order of their first points; groups
    of one point are left out."""
    groups: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        if point.status == "finished" and any(map(_SEED.fullmatch, point.overrides)):
            groups.setdefault(tuple(common_overrides(point)), []).append(point)
    return [_summary(list(common), members) for common, members in groups.items() if len(members) > 1]


def common_overrides(point: Point) -> list[str]:
    """Return the overrides of a point without its seed."""
    return [override for override in point.overrides if not _SEED.fullmatch(override) and override != "seeds=null"]


def seed_of(point: Point) -> int | None:
    """Return the seed that a point overrides; None if it overrides none."""
    return next((int(line[5:]) for line in point.overrides if _SEED.fullmatch(line)), None)


def _summary(common: list[str], points: Sequence[Point]) -> SeedGroup:
    seeds = [int(override[5:]) for point in points for override in point.overrides if _SEED.fullmatch(override)]
    measures = {name: measure for name in MEASURES if (measure := measure_over_seeds(points, name)) is not None}
    return SeedGroup(common, seeds, measures)


def measure_over_seeds(points: Sequence[Point], name: str) -> dict[str, Any] | None:
    """Return the mean of a measure over points of different seeds, with an interval that includes those within each
    seed. None without a value."""
    known = [(value, point.result or {}) for point in points if (value := point.value(name)) is not None]
    if not known:
        return None
    inner = [interval for _, result in known if (interval := result.get(f"{name}_interval"))]
    return seeds_interval([value for value, _ in known], inner)
