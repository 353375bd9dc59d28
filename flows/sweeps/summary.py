"""Summary of a sweep: a table of its settings, a comparison page, and the commands that rerun failed points."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from components.errors import EspalierError
from components.json_text import write_json
from flows.history.records import Records
from flows.reporting.comparison import LETTERS, compare
from flows.sweeps.points import Point, read
from flows.sweeps.settings import (
    Rates,
    SeedGroup,
    Setting,
    SettingDifference,
    difference,
    heldout_rates,
    over_seeds,
    settings_of,
)

logger = logging.getLogger(__name__)

PAGE = "comparison.html"
FILE = "summary.json"
COUNTED = ("finished", "pruned", "failed", "interrupted", "died")


@dataclass(frozen=True)
class Summary:
    """Outcome of a sweep."""

    points: list[Point]
    metric: str
    direction: str
    command: list[str]
    """Prefix of the command that runs a single point; the point's overrides are appended."""

    rates: Mapping[int, Rates] = field(default_factory=dict)
    """Held-out success by scenario, by the number of the point; empty if it is not readable."""

    @cached_property
    def settings(self) -> list[Setting]:
        """Settings; points that differ in their seed only are one setting."""
        return settings_of(self.points)

    @cached_property
    def leader(self) -> Setting | None:
        """Setting with the best mean of the metric, the first of equal ones; None without a value."""
        means = [(setting, measure["mean"]) for setting in self.settings if (measure := setting.measure(self.metric))]
        sign = 1 if self.direction == "maximize" else -1
        return max(means, key=lambda pair: sign * pair[1])[0] if means else None

    @cached_property
    def differences(self) -> list[SettingDifference | None]:
        """Difference of each setting to the leader; None for the leader and for settings without a value."""
        leader = self.leader
        return [
            difference(leader, setting, self.metric, self.rates)
            if leader is not None and setting is not leader and setting.measure(self.metric)
            else None
            for setting in self.settings
        ]

    @property
    def equals(self) -> list[Setting]:
        """The leader and the settings that are equal to it."""
        pairs = zip(self.settings, self.differences, strict=True)
        return [setting for setting, change in pairs if setting is self.leader or (change is not None and change.equal)]

    @property
    def best(self) -> Setting | None:
        """Setting that is better than all others; None among equals."""
        return self.leader if len(self.equals) == 1 else None

    @property
    def unsuccessful(self) -> list[Point]:
        """Points that neither finished nor were pruned, to be rerun."""
        return [point for point in self.points if point.status not in ("finished", "pruned")]

    @property
    def code(self) -> int:
        """Exit code: 0 if no point failed, 2 if all failures are user errors, else 1."""
        codes = {point.code or 1 for point in self.unsuccessful}
        return 0 if not codes else 2 if codes == {2} else 1

    def rerun_command(self, point: Point) -> str:
        """Return the command that runs this point alone."""
        return shlex.join([*self.command, *point.overrides])

    def distinct_overrides(self, setting: Setting) -> str:
        """Return the overrides of a setting that are not common to all settings."""
        if len(self.settings) < 2:
            return " ".join(setting.overrides)
        common = set.intersection(*(set(other.overrides) for other in self.settings))
        return " ".join(override for override in setting.overrides if override not in common)

    def counts(self) -> str:
        """Return a text such as `5 points: 3 finished, 1 pruned, 1 failed`."""
        counts = {name: sum(state(point) == name for point in self.points) for name in COUNTED}
        listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        return f"{len(self.points)} point{'s' * (len(self.points) != 1)}: {listed}"

    def figures(self) -> dict[str, float]:
        """Return the metrics for MLflow."""
        counts = {f"sweep/{name}": float(sum(state(point) == name for point in self.points)) for name in COUNTED}
        measure = self.leader.measure(self.metric) if self.leader else None
        return counts if measure is None else {**counts, f"sweep/best_{self.metric}": measure["mean"]}

    @property
    def seeds(self) -> list[SeedGroup]:
        """Results over the points that differ in their seed only."""
        return over_seeds(self.points)

    def to_json(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "direction": self.direction,
            "best": self.best.points[0].number if self.best else None,
            "tied": [setting.points[0].number for setting in self.equals] if len(self.equals) > 1 else [],
            "settings": [
                {
                    "overrides": setting.overrides,
                    "points": [point.number for point in setting.points],
                    "seeds": setting.seeds,
                    self.metric: setting.measure(self.metric),
                    "to_best": None if change is None else change.to_json(),
                }
                for setting, change in zip(self.settings, self.differences, strict=True)
            ],
            "seeds": [group.to_json() for group in self.seeds],
            "points": [asdict(point) | {"status": state(point)} for point in self.points],
            "again": {str(point.number): self.rerun_command(point) for point in self.unsuccessful},
        }


def state(point: Point) -> str:
    """Return the status of a point after the sweep. A file with the status `running` then comes from a killed process,
    so the point counts as `died`."""
    return "died" if point.status == "running" else point.status


def summarise(
    folder: Path, metric: str, direction: str, command: Sequence[str], root: Path, store: str | None
) -> Summary:
    """Return the summary of the sweep in a folder. root, store: of its runs."""
    points = read(folder)
    return Summary(points, metric, direction, list(command), heldout_rates(root, points, store))


def show(summary: Summary, sweep: str, page: Path | None) -> None:
    """Print the summary to stderr."""
    from rich.box import SIMPLE
    from rich.table import Table

    from flows.terminal.console import Console, duration

    console = Console()
    table = Table(title=f"sweep {sweep}, {summary.counts()}", box=SIMPLE, title_justify="left")
    names = list(dict.fromkeys((summary.metric, "success", "gain", "reward", "loss", "accuracy")))
    names = [name for name in names if any(setting.measure(name) for setting in summary.settings)]
    for name in ("points", "setting", "seeds", *names, "to the best", "time", "run", "state"):
        table.add_column(name, overflow="fold")
    for setting, change in zip(summary.settings, summary.differences, strict=True):
        runs = [str((point.result or {}).get("run_id", ""))[:8] for point in setting.points]
        table.add_row(
            ", ".join(str(point.number) for point in setting.points),
            summary.distinct_overrides(setting),
            ", ".join(map(str, setting.seeds)),
            *(_mean_and_interval(setting.measure(name)) for name in names),
            _to_best(summary, setting, change),
            duration(sum(point.seconds for point in setting.points)),
            " ".join(filter(None, runs)),
            ", ".join(dict.fromkeys(map(state, setting.points))),
        )
    console.table(table)
    if len(summary.equals) > 1:
        numbers = "; ".join(", ".join(str(point.number) for point in setting.points) for setting in summary.equals)
        console.line(
            f"no single best setting by {summary.metric}: the differences between these include 0: points {numbers}"
        )
    for point in summary.unsuccessful:
        reason = point.error or ("its process died" if point.status == "running" else "interrupted")
        console.line(f"point {point.number} {state(point)}: {reason}")
        console.line(f"  run it alone: {summary.rerun_command(point)}")
    if page is not None:
        console.line(f"comparison: {page}")


def _to_best(summary: Summary, setting: Setting, change: SettingDifference | None) -> str:
    """Return the difference of a setting to the best one as text."""
    if setting is summary.leader:
        return "best" if summary.best is setting else "first of equals"
    if change is None:
        return "–"
    interval = "" if change.low is None else f" [{change.low:+.3f}, {change.high:+.3f}]"
    return f"{change.difference:+.3f}{interval}{', equal' if change.equal else ''}"


def _mean_and_interval(measure: dict[str, Any] | None) -> str:
    if measure is None:
        return "–"
    interval = "" if measure["low"] is None else f" [{measure['low']:.3f}, {measure['high']:.3f}]"
    return f"{measure['mean']:.4g}" if not interval else f"{measure['mean']:.3f}{interval}"


def write(summary: Summary, folder: Path, root: Path, sweep: str) -> Path | None:
    """Write `summary.json` and the comparison page of the best runs, at most one per letter.

    Return the page, or None if there are fewer than two runs.
    """
    write_json(folder / FILE, summary.to_json())
    recorded = {run.id for run in Records(root).all() if run.sweep == sweep}
    sign = -1 if summary.direction == "maximize" else 1
    ranked = sorted(summary.points, key=lambda point: sign * (point.value(summary.metric) or 0.0))
    ids = [(point.result or {}).get("run_id") for point in ranked]
    runs = [run_id for run_id in ids if run_id in recorded]
    if len(runs) < 2:
        return None
    from components.pages.comparison import render

    page = folder / PAGE
    try:
        page.write_text(render(compare(root, runs[: len(LETTERS)])), encoding="utf-8")
    except EspalierError as error:
        logger.warning("cannot write the comparison page of the sweep: %s", error)
        return None
    return page
