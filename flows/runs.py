"""`python -m flows.runs`: list of the runs below a root, with the overrides in which they differ.

    python -m flows.runs --experiment quickstart --since 3d
    python -m flows.runs --tag baseline --metric 'success>=0.5' --best success --json

Runs are listed latest first; `--best METRIC` lists the best first. Metrics are numbers of the result line of a run:
success, gain, reward, seconds, cost, and others. Tags and notes come from `flows.tag` and `flows.note`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

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

SHOWN_METRIC = "success"


def show(runs: Sequence[ListedRun], metrics: Sequence[str]) -> str:
    """Return the list as text. metrics: names of the columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    changed = differing_overrides(runs)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("run", "started", "experiment", "seed", "state", *metrics, *changed, "tags", "notes"):
        table.add_column(Text(printable(name)), overflow="fold")
    for run in runs:
        cells = [
            run.id[:8],
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)),
            run.experiment,
            str(run.seed),
            run.state,
            *("–" if (value := run.metrics.get(name)) is None else f"{value:.4g}" for name in metrics),
            *(run.overrides.get(key, "") for key in changed),
            ", ".join(run.tags),
            "; ".join(run.notes),
        ]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    out = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False, emoji=False)
    with out.capture() as text:
        out.print(table)
    lines = [line.rstrip() for line in text.get().splitlines()]
    return "\n".join([*lines, f"{len(runs)} run{'s' * (len(runs) != 1)}"]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an error in the command."""
    parser = RootParser(
        prog="python -m flows.runs", description="Lists runs, latest first, with the overrides in which they differ."
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
        "--best", metavar="METRIC", help="best first by this metric; of seconds and cost the lowest is the best"
    )
    parser.add_argument("--limit", type=_positive, metavar="N", help="maximum number of runs")
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
    metrics = list(dict.fromkeys(named)) or [SHOWN_METRIC]
    print(json.dumps(to_json(runs)) if options.json else show(runs, metrics), end="\n" if options.json else "")
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return number


if __name__ == "__main__":
    raise SystemExit(main())
