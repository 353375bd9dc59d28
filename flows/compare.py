"""`python -m flows.compare A B …`: runs side by side; A is the baseline.

What differs in their configuration, the held-out results of each with 95 % intervals, the paired difference to A on
the scenarios that both played, held-out success by round, the rounds, time and cost by stage, and which scenarios
changed from fail to success or back. The terminal gets it in short; the page below `<root>/compare/` has all of it, the
curves, and the episodes of the scenarios that changed, side by side. `flows.reporting.comparison` reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError, ResourceError
from flows.reporting.comparison import MISSING, compare, listed
from flows.terminal.arguments import RootParser
from flows.terminal.console import duration, printable

if TYPE_CHECKING:
    from rich.table import Table

    from components.evaluation.comparison import Against, Comparison, Run, StageTotal

BARS = "▁▂▃▄▅▆▇█"
"""A share from 0 to 1, in the terminal."""
MOST_BARS = 32
"""Evaluations of one run that are drawn in the terminal; of more, as many that lie evenly."""


def to_json(comparison: Comparison, html: Path) -> dict[str, Any]:
    """The comparison as JSON data; without the episodes, which are on the page."""
    return {
        "runs": [
            {
                "letter": run.letter,
                "id": run.id,
                "name": run.name,
                "seed": run.seed,
                "status": run.status,
                "seconds": run.seconds,
                "git_commit": run.git_commit or None,
                "overrides": list(run.overrides),
                "evaluations": {name: dict(one.summary) for name, one in run.evaluations.items()},
                "heldout": {str(number): dict(summary) for number, summary in run.heldout.items()},
                "chosen": run.chosen,
                "rounds": {str(number): dict(values) for number, values in run.rounds.items()},
                "stages": {kind: asdict(total) for kind, total in run.stages.items()},
                "total": asdict(run.total),
                "notes": list(run.notes),
            }
            for run in comparison.runs
        ],
        "config": {"results": dict(comparison.results), "rest": dict(comparison.rest)},
        "against": {
            one.letter: {
                "title": one.title,
                "difference": None if one.difference is None else dict(one.difference),
                "notes": list(one.notes),
            }
            for one in comparison.against
        },
        "html": str(html),
    }


def show(comparison: Comparison, html: Path) -> str:
    """The comparison as text, in short."""
    from rich.console import Console

    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    with out.capture() as text:
        out.print(_table("", _rows(comparison.runs), comparison.runs))
        for title, found in (("what determines results", comparison.results), ("the rest", comparison.rest)):
            if found:
                out.print(
                    _table(title, [[key, *map(_short, values)] for key, values in found.items()], comparison.runs)
                )
    lines = [line.rstrip() for line in text.get().splitlines()]
    if not comparison.results and not comparison.rest:
        lines += ["the configurations are the same", ""]
    lines += [f"{run.letter}: {note}" for run in comparison.runs for note in run.notes]
    for one in comparison.against:
        lines += _difference(one)
    return "\n".join([*map(printable, lines), f"page: {html}"]) + "\n"


def _rows(runs: Sequence[Run]) -> list[list[str]]:
    from flows.reporting.results import with_interval

    rows = [
        ["run", *(run.short for run in runs)],
        ["experiment", *(f"{run.name} seed {run.seed}" for run in runs)],
        ["status", *(run.status for run in runs)],
    ]
    for name in dict.fromkeys(name for run in runs for name in run.evaluations):
        for measure in ("success", "reward", "turns"):
            found = [run.evaluations.get(name) for run in runs]
            rows.append(
                [f"{measure} {name}", *(with_interval(one.summary[measure]) if one else MISSING for one in found)]
            )
    if any(len(run.heldout) > 1 for run in runs):
        rows.append([f"success by round ({BARS[0]} 0, {BARS[-1]} 1)", *(_bars(run.heldout) for run in runs)])
        rows.append(["success at its highest", *(_highest(run.heldout) for run in runs)])
    if any(run.chosen is not None for run in runs):
        rows.append(["chosen as the best", *(MISSING if run.chosen is None else f"round {run.chosen}" for run in runs)])
    rows.append(["rounds", *(str(len(run.rounds)) for run in runs)])
    rows.append(["stages", *(f"{run.total.ran} ran, {run.total.cached} cached" for run in runs)])
    kinds = list(dict.fromkeys(kind for run in runs for kind in run.stages))
    for kind in kinds:
        totals = [run.stages.get(kind) for run in runs]
        rows.append([f"time {kind}", *(_time(total) if total else MISSING for total in totals)])
    rows.append(["time all", *(_time(run.total) for run in runs)])
    if any(run.total.cost for run in runs):
        rows.append(["cost", *(f"{run.total.cost:.4g}" for run in runs)])
    return rows


def _time(total: StageTotal) -> str:
    beside = f", and {duration(total.unnoticed)} beside others" if total.unnoticed else ""
    return f"{duration(total.seconds)}{beside}"


def _bars(heldout: Mapping[int, Mapping[str, Any]]) -> str:
    """Success by round: `▁▃▅▅█ rounds 0 to 8`."""
    if not heldout:
        return MISSING
    values = [one["success"]["mean"] for one in heldout.values()]
    last, count = len(values) - 1, min(len(values), MOST_BARS)
    shown = [values[round(place * last / max(count - 1, 1))] for place in range(count)]
    bars = "".join(" " if one is None else BARS[min(int(one * len(BARS)), len(BARS) - 1)] for one in shown)
    rounds = f"rounds {min(heldout)} to {max(heldout)}" if last else f"round {min(heldout)}"
    return f"{bars} {rounds}{f', {count} of {len(values)}' if count < len(values) else ''}"


def _highest(heldout: Mapping[int, Mapping[str, Any]]) -> str:
    """The highest success with its interval, of equal ones the earliest: `0.500 [0.250, 0.750] round 4`."""
    from flows.experiment.early_stopping import best_of
    from flows.reporting.results import with_interval

    place = best_of([one["success"]["mean"] for one in heldout.values()])
    if place is None:
        return MISSING
    number, summary = list(heldout.items())[place]
    return f"{with_interval(summary['success'])} round {number}"


def _table(title: str, rows: Sequence[Sequence[str]], runs: Sequence[Run]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column(title)
    for run in runs:
        table.add_column(run.letter, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    table.add_row()  # an empty line
    return table


def _difference(one: Against) -> list[str]:
    from flows.reporting.results import interval

    lines = [f"{one.title}: {note}" for note in one.notes]
    if (found := one.difference) is not None:
        lines.insert(
            0,
            f"{one.title}: success {found['difference']:+.3f} {interval(found)} on the same {found['n']} scenarios",
        )
        lines += [
            f"  {len(names)} {what}{': ' if names else ''}{listed(names)}"
            for what, names in (("better", one.improved), ("worse", one.regressed))
        ]
    return lines


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:59]}…"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake in the command."""
    parser = RootParser(
        prog="python -m flows.compare", description="Shows runs side by side; the first one is the baseline."
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="id, beginning of an id, experiment's name (its latest run), or latest"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="where the page goes; ROOT/compare/IDS.html if not given"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_intermixed_args(argv)
    try:
        comparison = compare(options.root, options.runs)
        html = options.html or options.root / "compare" / f"{'-'.join(run.short for run in comparison.runs)}.html"
        _write(html, comparison)
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        json.dumps(to_json(comparison, html.absolute())) if options.json else show(comparison, html.absolute()),
        end="\n" if options.json else "",
    )
    return 0


def _write(path: Path, comparison: Comparison) -> None:
    from components.evaluation.comparison import render

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(comparison), encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}; give another file: --html FILE") from None


if __name__ == "__main__":
    raise SystemExit(main())
