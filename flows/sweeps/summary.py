"""Summary of a sweep: a table of its points, a comparison page, and the commands that rerun failed points."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.errors import EspalierError
from flows.history.records import Records
from flows.reporting.comparison import LETTERS, compare
from flows.sweeps.points import Point, read
from flows.sweeps.seeds import MEASURES, SeedGroup, over_seeds

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

    @property
    def leaders(self) -> list[Point]:
        """Finished points with the best value of the metric, in order; several if they tie."""
        values = {
            point.number: value
            for point in self.points
            if point.status == "finished" and (value := point.value(self.metric)) is not None
        }
        best = (max if self.direction == "maximize" else min)(values.values(), default=None)
        return [point for point in self.points if values.get(point.number) == best and best is not None]

    @property
    def best(self) -> Point | None:
        """Finished point with the best value of the metric; None if several tie."""
        leaders = self.leaders
        return leaders[0] if len(leaders) == 1 else None

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

    def distinct_overrides(self, point: Point) -> str:
        """Return the point's overrides that are not common to all points."""
        if len(self.points) < 2:
            return " ".join(point.overrides)
        common = set.intersection(*(set(other.overrides) for other in self.points))
        return " ".join(override for override in point.overrides if override not in common)

    def counts(self) -> str:
        """Return a text such as `5 points: 3 finished, 1 pruned, 1 failed`."""
        counts = {name: sum(state(point) == name for point in self.points) for name in COUNTED}
        listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        return f"{len(self.points)} point{'s' * (len(self.points) != 1)}: {listed}"

    def figures(self) -> dict[str, float]:
        """Return the metrics for MLflow."""
        counts = {f"sweep/{name}": float(sum(state(point) == name for point in self.points)) for name in COUNTED}
        value = self.leaders[0].value(self.metric) if self.leaders else None
        return counts if value is None else {**counts, f"sweep/best_{self.metric}": value}

    @property
    def seeds(self) -> list[SeedGroup]:
        """Results over the points that differ in their seed only."""
        return over_seeds(self.points)

    def to_json(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "direction": self.direction,
            "best": self.best.number if self.best else None,
            "tied": [point.number for point in self.leaders] if len(self.leaders) > 1 else [],
            "seeds": [group.to_json() for group in self.seeds],
            "points": [asdict(point) | {"status": state(point)} for point in self.points],
            "again": {str(point.number): self.rerun_command(point) for point in self.unsuccessful},
        }


def state(point: Point) -> str:
    """Return the status of a point after the sweep. A file with the status `running` then comes from a killed process,
    so the point counts as `died`."""
    return "died" if point.status == "running" else point.status


def summarise(folder: Path, metric: str, direction: str, command: Sequence[str]) -> Summary:
    return Summary(read(folder), metric, direction, list(command))


def show(summary: Summary, sweep: str, page: Path | None) -> None:
    """Print the summary to stderr."""
    from rich.box import SIMPLE
    from rich.table import Table

    from flows.terminal.console import Console, duration

    console = Console()
    table = Table(title=f"sweep {sweep}, {summary.counts()}", box=SIMPLE, title_justify="left")
    table.add_column("point", justify="right")
    table.add_column("", overflow="fold")
    for name in dict.fromkeys((summary.metric, "success", "reward")):
        table.add_column(name, justify="right")
    for name in ("time", "run", "state"):
        table.add_column(name)
    for point in summary.points:
        values = [_figure(point, name) for name in dict.fromkeys((summary.metric, "success", "reward"))]
        run = str((point.result or {}).get("run_id", ""))[:8]
        mark = " (best)" if summary.best is point else ""
        table.add_row(
            str(point.number),
            summary.distinct_overrides(point),
            *values,
            duration(point.seconds),
            run,
            state(point) + mark,
        )
    console.table(table)
    if groups := summary.seeds:
        console.table(_seed_table(groups))
    if len(summary.leaders) > 1:
        numbers = ", ".join(str(point.number) for point in summary.leaders)
        value = summary.leaders[0].value(summary.metric)
        console.line(f"no single best point: points {numbers} tie at {summary.metric} = {value:.3f}")
    for point in summary.unsuccessful:
        reason = point.error or ("its process died" if point.status == "running" else "interrupted")
        console.line(f"point {point.number} {state(point)}: {reason}")
        console.line(f"  run it alone: {summary.rerun_command(point)}")
    if page is not None:
        console.line(f"comparison: {page}")


def _seed_table(groups: Sequence[SeedGroup]) -> Any:
    """Return the table of the results over seeds."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title="over seeds, mean [95 % interval]", box=SIMPLE, title_justify="left")
    names = [name for name in MEASURES if any(name in group.measures for group in groups)]
    for name in ("", "seeds", *names):
        table.add_column(name, overflow="fold")
    shared = set.intersection(*(set(group.overrides) for group in groups))
    for group in groups:
        cells = [_mean_and_interval(group.measures.get(name)) for name in names]
        table.add_row(
            " ".join(line for line in group.overrides if line not in shared), ", ".join(map(str, group.seeds)), *cells
        )
    return table


def _mean_and_interval(measure: dict[str, Any] | None) -> str:
    if measure is None:
        return "–"
    interval = "" if measure["low"] is None else f" [{measure['low']:.3f}, {measure['high']:.3f}]"
    return f"{measure['mean']:.3f}{interval}"


def write(summary: Summary, folder: Path, root: Path, sweep: str) -> Path | None:
    """Write `summary.json` and the comparison page of the best runs, at most one per letter.

    Return the page, or None if there are fewer than two runs.
    """
    (folder / FILE).write_text(json.dumps(summary.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    recorded = {run.id for run in Records(root).all() if run.sweep == sweep}
    sign = -1 if summary.direction == "maximize" else 1
    ranked = sorted(summary.points, key=lambda point: sign * (point.value(summary.metric) or 0.0))
    ids = [(point.result or {}).get("run_id") for point in ranked]
    runs = [run_id for run_id in ids if run_id in recorded]
    if len(runs) < 2:
        return None
    from components.evaluation.comparison import render

    page = folder / PAGE
    try:
        page.write_text(render(compare(root, runs[: len(LETTERS)])), encoding="utf-8")
    except EspalierError as error:
        logger.warning("cannot write the comparison page of the sweep: %s", error)
        return None
    return page


def _figure(point: Point, name: str) -> str:
    value = point.value(name)
    interval = (point.result or {}).get(f"{name}_interval")
    if value is None:
        return "–"
    return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else f"{value:.4g}"
