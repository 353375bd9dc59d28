"""Settings of a sweep: points that differ in their seed only are one setting, and settings are compared with the best.

`seeds: [0, 1, 2]` in an experiment, or on the command line, becomes a sweep over `seed`, with means and Student-t
intervals over the seeds. Stages that do not sample have the same key for each seed, so they are computed once.

For held-out success, the difference of two settings has the interval of a verdict (`components.evaluation.verdict`):
over seeds and scenarios with several seeds, over scenarios with one seed each. For other metrics it is Student's t over
the common seeds, and includes the uncertainty within each. A setting whose interval includes 0 is equal to the best.
Without an interval on either side (one seed, and a metric of the whole run), the values are compared.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from components.evaluation.metrics import Estimate, bootstrap, seeds_difference, seeds_interval
from components.evaluation.proportions import newcombe
from components.evaluation.verdict import outcome, seeded_effect
from flows.history.records import Records, RunRecord
from flows.history.store_reader import StoreReader
from flows.history.trust import recorded_reader
from flows.reporting.sides import success_by_scenario
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
    seeded = [point for point in points if point.status == "finished" and seed_of(point) is not None]
    return [
        SeedGroup(
            setting.overrides,
            setting.seeds,
            {name: mean for name in MEASURES if (mean := measure_over_seeds(setting.points, name)) is not None},
        )
        for setting in settings_of(seeded)
        if len(setting.points) > 1
    ]


def common_overrides(point: Point) -> list[str]:
    """Return the overrides of a point without its seed."""
    return [override for override in point.overrides if not _SEED.fullmatch(override) and override != "seeds=null"]


def seed_of(point: Point) -> int | None:
    """Return the seed that a point overrides; None if it overrides none."""
    return next((int(line[5:]) for line in point.overrides if _SEED.fullmatch(line)), None)


def measure_over_seeds(points: Sequence[Point], name: str) -> dict[str, Any] | None:
    """Return the mean of a measure over points of different seeds, with an interval that includes those within each
    seed. None without a value."""
    known = [(value, point.result or {}) for point in points if (value := point.value(name)) is not None]
    if not known:
        return None
    inner = [interval for _, result in known if (interval := result.get(f"{name}_interval"))]
    return seeds_interval([value for value, _ in known], inner)


logger = logging.getLogger(__name__)

Rates = Mapping[tuple[str, str], float]
"""Held-out success by scenario."""


@dataclass(frozen=True)
class Setting:
    """Points with the same overrides, except the seed."""

    overrides: list[str]
    points: list[Point]

    @property
    def finished(self) -> list[Point]:
        """Points that finished."""
        return [point for point in self.points if point.status == "finished"]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the points, as far as they are overridden."""
        return [seed for point in self.points if (seed := seed_of(point)) is not None]

    def measure(self, name: str) -> dict[str, Any] | None:
        """Return the mean over the finished points with its interval over seeds; None without a value."""
        measure = measure_over_seeds(self.finished, name)
        if (
            measure is not None
            and measure["n"] == 1
            and (own := (self.finished[0].result or {}).get(f"{name}_interval"))
        ):
            measure |= {"low": own[0], "high": own[1]}  # over scenarios
        return measure


@dataclass(frozen=True)
class SettingDifference:
    """Difference of a setting to the best one."""

    difference: float
    low: float | None
    high: float | None
    equal: bool
    """True if the difference is undecided."""

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON data."""
        interval = None if self.low is None else [self.low, self.high]
        return {"difference": self.difference, "interval": interval, "equal_to_best": self.equal}


def settings_of(points: Sequence[Point]) -> list[Setting]:
    """Return the settings in the order of their first points."""
    groups: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(common_overrides(point)), []).append(point)
    return [Setting(list(overrides), members) for overrides, members in groups.items()]


def difference(best: Setting, other: Setting, metric: str, rates: Mapping[int, Rates]) -> SettingDifference:
    """Return the difference of a setting to the best one. rates: held-out success by the number of the point."""
    change = _mean(other, metric) - _mean(best, metric)
    if metric == "success" and (paired := _success_difference(best, other, rates)) is not None:
        low, high = paired
    else:
        low, high = _difference_over_seeds(best, other, metric)
    unmeasured = low is None and max(len(best.finished), len(other.finished)) == 1
    equal = change == 0 if unmeasured else outcome(low, high) == "undecided"
    return SettingDifference(change, low, high, equal)


def _mean(setting: Setting, metric: str) -> float:
    return fmean(value for point in setting.finished if (value := point.value(metric)) is not None)


def _difference_over_seeds(best: Setting, other: Setting, metric: str) -> tuple[float | None, float | None]:
    first, second = (_estimates(side, metric) for side in (best, other))
    pairs = [(first[seed], second[seed]) for seed in first if seed is not None and seed in second]
    if not pairs:
        return None, None
    measure = seeds_difference(pairs)
    return measure["low"], measure["high"]


def _estimates(setting: Setting, metric: str) -> dict[int | None, Estimate]:
    """Return the value of a metric and its interval over scenarios, if it has one, by seed."""
    return {
        seed_of(point): (value, (point.result or {}).get(f"{metric}_interval"))
        for point in setting.finished
        if (value := point.value(metric)) is not None
    }


def _success_difference(
    best: Setting, other: Setting, rates: Mapping[int, Rates]
) -> tuple[float | None, float | None] | None:
    """Return the interval over scenarios, and over seeds if both have several; None without common scenarios."""
    sides = [{seed_of(point): rates.get(point.number) for point in side.finished} for side in (best, other)]
    tables = [rate for side in sides for rate in side.values()]
    if not all(tables):
        return None
    shared = sorted(set.intersection(*(set(rate or {}) for rate in tables)))
    if len(shared) < 2:
        return None
    before, after = (
        {seed: [rate[name] for name in shared] for seed, rate in side.items() if rate is not None} for side in sides
    )
    if min(len(before), len(after)) > 1:
        same = before.keys() == after.keys()
        effect = seeded_effect(
            list(before.values()), [after[seed] for seed in (before if same else after)], paired=same
        )
        return effect.low, effect.high
    if max(len(before), len(after)) > 1:
        return None, None
    return _paired_interval(next(iter(before.values())), next(iter(after.values())))


def _paired_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float | None, float | None]:
    pairs = list(zip(before, after, strict=True))
    if not {*before, *after} <= {0.0, 1.0}:
        return bootstrap([[b - a] for a, b in pairs])
    return newcombe(
        both=pairs.count((1.0, 1.0)),
        gained=pairs.count((0.0, 1.0)),
        lost=pairs.count((1.0, 0.0)),
        neither=pairs.count((0.0, 0.0)),
    )


def heldout_rates(root: Path, points: Sequence[Point], store: str | None) -> dict[int, Rates]:
    """Return held-out success by scenario of the last evaluation of each finished point, by its number. Points without
    a record or an evaluation in the store are left out. store: of the sweep."""
    records = {run.id: run for run in Records(root).all()}
    rates = {}
    for point in points:
        run = records.get(str((point.result or {}).get("run_id")))
        if run is not None and point.status == "finished":
            rate = last_rates(run, recorded_reader(root, run, trust=False, own=store))
            if rate:
                rates[point.number] = rate
    return rates


def last_rates(run: RunRecord, reader: StoreReader) -> Rates | None:
    """Return held-out success by scenario of a run's last evaluation; None if it is not readable."""
    from components.trajectories.stored import StoredTrajectories

    evaluations = [stage for stage in run.stages if stage.request["stage"] == "evaluate"]
    if not evaluations:
        return None
    last = next((stage for stage in evaluations if stage.label == "evaluate[final]"), evaluations[-1])
    with reader.opened(last.key) as artifact:
        if artifact is None:
            return None
        try:
            return success_by_scenario(StoredTrajectories(artifact.path))
        except (OSError, ValueError) as error:
            logger.warning("cannot read %s of run %s: %s", last.label, run.short, error)
            return None
