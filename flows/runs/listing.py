"""`python -m flows.runs`: list of the runs below a root, with the overrides in which they differ.

    python -m flows.runs --experiment quickstart --since 3d
    python -m flows.runs --tag baseline --metric 'success>=0.5' --best success --json

Runs are listed latest first; `--best METRIC` lists the best first. Metrics are numbers of the result line of a run:
success, gain, reward, seconds, cost, and others. Tags and notes come from `flows.runs tag` and `flows.runs note`.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence

from components.errors import EspalierError
from flows.reporting.run_list import (
    STATES,
    Condition,
    ListedRun,
    RunFilter,
    differing_overrides,
    list_runs,
    parse_since,
    to_json,
)
from flows.terminal.arguments import RootParser
from flows.terminal.console import printable
from flows.terminal.exit_codes import print_message

SHOWN_METRICS = ["success", "loss"]
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
        changed = {key: [_cut(cell) for cell in cells] for key, cells in changed.items()}
        labels = {name: [_cut(cell) for cell in cells] for name, cells in labels.items()}
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


def _cut(text: str) -> str:
    return text if len(text) <= CELL_WIDTH else f"{text[: CELL_WIDTH - 1]}…"


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
