"""`python -m flows.runs`: list of the runs below a root, with the overrides in which they differ.

    python -m flows.runs --experiment quickstart --since 3d
    python -m flows.runs --tag baseline --metric 'success>=0.5' --best success --json

Runs are listed latest first; `--best METRIC` lists the best first. Metrics are numbers of the result line of a run:
success, gain, reward, seconds, cost, and others. Tags and notes come from `flows.runs tag` and `flows.runs note`.
"""

from __future__ import annotations

import argparse
import json
import operator
import re
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from components.errors import EspalierError, ResourceError
from components.specs import nearest
from flows.history.labels import Labels
from flows.history.records import Records, RunRecord
from flows.terminal.arguments import RootParser
from flows.terminal.console import printable, shorten
from flows.terminal.exit_codes import print_message

STATES = ("running", "finished", "pruned", "failed", "killed")
LOWER_IS_BETTER = ("loss", "loss_before", "loss_sum", "seconds", "cost", "peak_memory_gb", "unpriced_calls")
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


SHOWN_METRICS = ["success", "loss", "loss_sum"]
"""Metrics with a column by default, if a run has them."""
PIPE_WIDTH = 120
"""Width of the list where the output is no terminal."""
CELL_WIDTH = 24
"""Maximum number of characters of a value, unless the list is wide."""
GAP = 2
LISTED_WIDTH = 80
"""Maximum number of characters of the names of overrides without a column."""


def show(runs: Sequence[ListedRun], metrics: Sequence[str], *, wide: bool = False) -> str:
    """Return the list as text. metrics: names of the columns. wide: show a column for each override that differs and
    all values in full; else those columns that fit, first the keys that most runs override."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = {
        "run": [run.id[:8] for run in runs],
        "started": [time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)) for run in runs],
        "experiment": [run.experiment for run in runs],
        "seed": [str(run.seed) for run in runs],
        "state": [run.state for run in runs],
        **{name: [_number(run.metrics.get(name)) for run in runs] for name in metrics},
    }
    labels = {"tags": [", ".join(run.tags) for run in runs], "notes": ["; ".join(run.notes) for run in runs]}
    labels = {name: cells for name, cells in labels.items() if any(cells)}
    changed = {key: [run.overrides.get(key, "") for run in runs] for key in differing_overrides(runs)}
    available = Console().width if sys.stdout.isatty() else PIPE_WIDTH
    if not wide:
        changed = {key: [shorten(cell, CELL_WIDTH) for cell in cells] for key, cells in changed.items()}
        labels = {name: [shorten(cell, CELL_WIDTH) for cell in cells] for name, cells in labels.items()}
    shown = list(changed) if wide else _fitting(changed, available - _width({**columns, **labels}))
    columns |= {key: changed[key] for key in shown} | labels
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for name in columns:
        table.add_column(Text(printable(name)), overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*(Text(printable(cell)) for cell in cells))
    width = max(available, _width(columns)) if wide else available
    out = Console(width=width, highlight=False, markup=False, emoji=False)
    with out.capture() as text:
        out.print(table)
    lines = [line.rstrip() for line in text.get().splitlines()]
    if hidden := [printable(key) for key in changed if key not in shown]:
        listed = textwrap.shorten(", ".join(hidden), LISTED_WIDTH, placeholder=" …")
        lines.append(f"{len(hidden)} more differ: {listed}; --wide shows all")
    return "\n".join([*lines, f"{len(runs)} run{'s' * (len(runs) != 1)}"]) + "\n"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    """Return the characters that columns take side by side without a line break."""
    return sum(max(len(printable(text)) for text in (name, *cells)) + GAP for name, cells in columns.items())


def _fitting(columns: Mapping[str, Sequence[str]], width: int) -> list[str]:
    """Return the names of the columns that fit, in their order. Those with the most values come first."""
    chosen = set()
    for name in sorted(columns, key=lambda name: -sum(map(bool, columns[name]))):
        needed = _width({name: columns[name]})
        if needed <= width:
            width -= needed
            chosen.add(name)
    return [name for name in columns if name in chosen]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an error in the command."""
    parser = RootParser(
        prog="python -m flows.runs list",
        description="Lists runs, latest first, with the overrides in which they differ.",
    )
    parser.add_argument("--experiment", metavar="NAME", help="only runs of this experiment")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="only runs with this tag; repeatable")
    parser.add_argument("--since", metavar="TIME", help="only runs started since: 90m, 12h, 3d, 2w, or 2026-11-25")
    parser.add_argument(
        "--state", action="append", default=[], choices=STATES, help="only runs in this state; repeatable"
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="CONDITION",
        help="show a metric, and list only runs that have it: success, or satisfy a condition: 'success>=0.5'; "
        "repeatable",
    )
    parser.add_argument(
        "--best", metavar="METRIC", help="best first by this metric; of loss, seconds and cost the lowest is the best"
    )
    parser.add_argument("--limit", type=_positive, metavar="N", help="maximum number of runs")
    parser.add_argument("--wide", action="store_true", help="show a column for each override that differs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    try:
        since = parse_since(options.since, time.time()) if options.since else None
        conditions = [Condition.parse(text) for text in options.metric]
        filters = RunFilter(options.experiment, options.tag, since, options.state, conditions)
        runs = list_runs(options.root, filters, options.best)[: options.limit]
    except EspalierError as error:
        print_message(error)
        return 2
    named = [*([options.best] if options.best else []), *(condition.metric for condition in conditions)]
    shown = [name for name in SHOWN_METRICS if any(name in run.metrics for run in runs)] or SHOWN_METRICS[:1]
    metrics = list(dict.fromkeys(named)) or shown
    text = f"{json.dumps(to_json(runs))}\n" if options.json else show(runs, metrics, wide=options.wide)
    print(text, end="")
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return number
