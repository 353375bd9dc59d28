"""List of runs: filters, order, and the overrides in which the listed runs differ."""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from components.errors import ResourceError
from components.specs import nearest
from flows.history.labels import Labels
from flows.history.records import Records, RunRecord

STATES = ("running", "finished", "pruned", "failed", "killed")
LOWER_IS_BETTER = ("loss", "loss_before", "seconds", "cost", "peak_memory_gb", "unpriced_calls")
"""Numbers of the result line of which the lowest is the best."""
UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_CONDITION = re.compile(r"([a-z_][a-z0-9_]*)(?:\s*(>=|<=|>|<|=)\s*(-?[0-9.eE+-]+))?")
_COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq}


@dataclass(frozen=True)
class ListedRun:
    """Row of the list."""

    id: str
    experiment: str
    seed: int
    state: str
    started: float
    """Seconds since the epoch."""
    tags: list[str]
    notes: list[str]
    overrides: dict[str, str]
    """Overrides by key, without root and experiment."""
    metrics: dict[str, float]
    """Numbers of the result line; empty before the end."""


@dataclass(frozen=True)
class Condition:
    """Metric, and the comparison that its value has to satisfy; without one, the run needs a value."""

    metric: str
    sign: str | None = None
    bound: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Return the condition that a text states, such as `success` or `success>=0.5`. Raises ResourceError."""
        match = _CONDITION.fullmatch(text.strip())
        try:
            if match is not None:
                return cls(match[1], match[2], float(match[3] or 0))
        except ValueError:
            pass
        raise ResourceError(f"--metric {text!r:.80}: expected a metric, as success, or a condition, as 'success>=0.5'")

    def holds(self, run: ListedRun) -> bool:
        """Return True if a run has the metric and its value satisfies the comparison."""
        value = run.metrics.get(self.metric)
        return value is not None and (self.sign is None or bool(_COMPARISONS[self.sign](value, self.bound)))


@dataclass(frozen=True)
class RunFilter:
    """Filters of the list; each run satisfies all of them."""

    experiment: str | None = None
    tags: Sequence[str] = ()
    since: float | None = None
    """Earliest start, in seconds since the epoch."""
    states: Sequence[str] = ()
    """Accepted states; empty: all."""
    conditions: Sequence[Condition] = ()

    def admits(self, run: ListedRun) -> bool:
        """Return True if the run satisfies the filters."""
        return (
            self.experiment in (None, run.experiment)
            and set(self.tags) <= set(run.tags)
            and (self.since is None or run.started >= self.since)
            and (not self.states or run.state in self.states)
            and all(condition.holds(run) for condition in self.conditions)
        )


def list_runs(root: Path, filters: RunFilter, best: str | None = None) -> list[ListedRun]:
    """Return the runs that satisfy the filters, latest first, or best first by a metric, without those that lack it.
    Raises ResourceError for an experiment, tag or metric that no run has."""
    records, labels = Records(root), Labels(root)
    runs = [_listed(run, records, labels) for run in records.all()]
    if not runs:
        raise ResourceError(f"there is no run below {root} yet; set the folder of your runs: root=DIR")
    _check("--experiment", [filters.experiment] if filters.experiment else [], {run.experiment for run in runs})
    _check("--tag", filters.tags, {tag for run in runs for tag in run.tags})
    metrics = [condition.metric for condition in filters.conditions] + ([best] if best else [])
    _check("--best" if best else "--metric", metrics, {name for run in runs for name in run.metrics})
    runs = [run for run in runs if filters.admits(run)]
    if best is None:
        return runs
    sign = 1 if best in LOWER_IS_BETTER else -1
    return sorted((run for run in runs if best in run.metrics), key=lambda run: sign * run.metrics[best])


def _listed(run: RunRecord, records: Records, labels: Labels) -> ListedRun:
    own = labels.of(run)
    numbers = {
        name: float(value)
        for name, value in (run.result or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "seed"
    }
    pairs = [override.lstrip("+").partition("=") for override in run.overrides]
    overrides = {key: value for key, _, value in pairs if key not in ("root", "experiment", "seed", "seeds")}
    return ListedRun(
        run.id, run.name, run.seed, records.status(run), run.started, own.tags, own.notes, overrides, numbers
    )


def _check(option: str, names: Sequence[str], known: set[str]) -> None:
    """Raise ResourceError for a name that no run has."""
    for name in names:
        if name not in known:
            near = nearest(name, sorted(known))
            hint = f" (did you mean {near}?)" if near else ""
            raise ResourceError(
                f"{option} {name!r:.80}: no run has it{hint}; known: {', '.join(sorted(known)) or 'none'}"
            )


def differing_overrides(runs: Sequence[ListedRun]) -> list[str]:
    """Return the keys of the overrides whose values differ between the runs."""
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    return [key for key in keys if len({run.overrides.get(key) for run in runs}) > 1]


def parse_since(text: str, now: float) -> float:
    """Return the time that a text states: a duration before now (`90m`, `12h`, `3d`, `2w`) or a date. Raises
    ResourceError."""
    if match := re.fullmatch(r"([0-9]{1,6})([mhdw])", text):
        return now - int(match[1]) * UNITS[match[2]]
    try:
        return time.mktime(datetime.fromisoformat(text).timetuple())
    except (ValueError, OverflowError):
        raise ResourceError(
            f"--since {text!r:.80}: expected a duration such as 90m, 12h, 3d, 2w, or a date such as 2026-11-25"
        ) from None


def to_json(runs: Sequence[ListedRun]) -> dict[str, Any]:
    """Return the list as JSON data."""
    changed = differing_overrides(runs)
    return {
        "changed": changed,
        "runs": [
            {
                "id": run.id,
                "experiment": run.experiment,
                "seed": run.seed,
                "state": run.state,
                "started": datetime.fromtimestamp(run.started).astimezone().isoformat(timespec="seconds"),
                "tags": run.tags,
                "notes": run.notes,
                "changed": {key: run.overrides.get(key) for key in changed},
                "overrides": run.overrides,
                "metrics": run.metrics,
            }
            for run in runs
        ],
    }
