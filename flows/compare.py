"""`python -m flows.compare RUN RUN …` or `A=RUN,RUN,RUN B=RUN,RUN,RUN`: comparison of runs, or of settings with several
seeds each, with a verdict. The first one is the baseline. `python -m flows.compare ROOT/served` compares the versions
of a served policy by the feedback of its users (`flows.reporting.production`).

Runs with the same settings and different seeds form a side, stated or found by their settings. The verdict `better`,
`worse` or `undecided` follows from the 95 % interval of the difference in held-out success, over seeds and scenarios
(`components.evaluation.verdict`).

The comparison covers differences of the configuration, held-out results with 95 % intervals, the paired difference to A
on common scenarios, held-out success by round, time and cost by stage, and the scenarios that changed from failure to
success or back. The terminal shows a summary. The page below `<root>/compare/` shows everything, with curves and with
the episodes of the changed scenarios side by side. `flows.reporting.comparison` computes the comparison.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.data.served.log import files
from components.errors import EspalierError
from flows.reporting import production
from flows.reporting.comparison import compare, join_names
from flows.reporting.settings import MISSING
from flows.reporting.sides import stated_sides
from flows.terminal.arguments import RootParser, add_store_trust
from flows.terminal.console import duration, printable, shorten
from flows.terminal.exit_codes import print_message
from flows.terminal.pages import write_page

if TYPE_CHECKING:
    from rich.table import Table

    from components.pages.comparison import BaselineComparison, ComparedRun, RunComparison, StageTotal

BARS = "▁▂▃▄▅▆▇█"
"""Characters that draw a share from 0 to 1 in the terminal."""
MOST_BARS = 32
"""Maximum number of evaluations of a run drawn in the terminal; of more, evenly spaced ones are drawn."""


def to_json(comparison: RunComparison, html: Path) -> dict[str, Any]:
    """Return the comparison as JSON data, without the episodes, which only the page shows."""
    verdicts = [verdict.to_json() for verdict in comparison.verdicts]
    return {
        **{key: verdicts[0][key] for key in ("verdict", "effect", "interval", "more_seeds")},
        "verdicts": verdicts,
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
                "evaluations": {name: dict(evaluation.summary) for name, evaluation in run.evaluations.items()},
                "heldout": {str(number): dict(summary) for number, summary in run.heldout.items()},
                "validations": {name: dict(metrics) for name, metrics in run.validations.items()},
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
            against.letter: {
                "title": against.title,
                "difference": None if against.difference is None else dict(against.difference),
                "notes": list(against.notes),
            }
            for against in comparison.against
        },
        "html": str(html),
    }


def show(comparison: RunComparison, html: Path) -> str:
    """Return a summary of the comparison as text."""
    from rich.console import Console

    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    with out.capture() as text:
        out.print(_table("", _rows(comparison.runs), comparison.runs))
        for title, settings in (
            ("settings that affect results", comparison.results),
            ("other settings", comparison.rest),
        ):
            if settings:
                rows = [[key, *(shorten(value, 60) for value in values)] for key, values in settings.items()]
                out.print(_table(title, rows, comparison.runs))
    lines = [line.rstrip() for line in text.get().splitlines()]
    if not comparison.results and not comparison.rest:
        lines += ["the configurations are identical", ""]
    lines += [f"{run.letter}: {note}" for run in comparison.runs for note in run.notes]
    for against in comparison.against:
        lines += _difference(against)
    lines += [f"verdict: {verdict.text()}" for verdict in comparison.verdicts]
    return "\n".join([*map(printable, lines), f"page: {html}"]) + "\n"


def _rows(runs: Sequence[ComparedRun]) -> list[list[str]]:
    from flows.reporting.results import with_interval

    rows = [
        ["run", *(run.short for run in runs)],
        ["experiment", *(f"{run.name} seed {run.seed}" for run in runs)],
        ["status", *(run.status for run in runs)],
    ]
    for name in dict.fromkeys(name for run in runs for name in run.evaluations):
        for measure in ("success", "reward", "turns"):
            evaluations = [run.evaluations.get(name) for run in runs]
            rows.append(
                [
                    f"{measure} {name}",
                    *(
                        with_interval(evaluation.summary[measure]) if evaluation else MISSING
                        for evaluation in evaluations
                    ),
                ]
            )
    for name in ("loss", "accuracy"):
        for point in ("before", "after"):
            values = [run.validations.get(point, {}).get(name) for run in runs]
            if any(value is not None for value in values):
                cells = (MISSING if value is None else f"{value:.3f}" for value in values)
                rows.append([f"{name} of held-out rows, {point} training", *cells])
    if any(len(run.heldout) > 1 for run in runs):
        rows.append([f"success by round ({BARS[0]} 0, {BARS[-1]} 1)", *(_bars(run.heldout) for run in runs)])
        rows.append(["highest success", *(_highest(run.heldout) for run in runs)])
    if any(run.chosen is not None for run in runs):
        rows.append(["selected as best", *(MISSING if run.chosen is None else f"round {run.chosen}" for run in runs)])
    rows.append(["rounds", *(str(len(run.rounds)) for run in runs)])
    rows.append(["stages", *(f"{run.total.ran} ran, {run.total.cached} cached" for run in runs)])
    kinds = list(dict.fromkeys(kind for run in runs for kind in run.stages))
    for kind in kinds:
        totals = [run.stages.get(kind) for run in runs]
        rows.append([f"time {kind}", *(_time(total) if total else MISSING for total in totals)])
    rows.append(["time total", *(_time(run.total) for run in runs)])
    if any(run.total.cost for run in runs):
        rows.append(["cost", *(f"{run.total.cost:.4g}" for run in runs)])
    return rows


def _time(total: StageTotal) -> str:
    overlapped = f", plus {duration(total.overlapped_seconds)} overlapped" if total.overlapped_seconds else ""
    return f"{duration(total.seconds)}{overlapped}"


def _bars(heldout: Mapping[int, Mapping[str, Any]]) -> str:
    """Return success by round as bars: `▁▃▅▅█ rounds 0 to 8`."""
    if not heldout:
        return MISSING
    values = [summary["success"]["mean"] for summary in heldout.values()]
    last, count = len(values) - 1, min(len(values), MOST_BARS)
    sample = [values[round(index * last / max(count - 1, 1))] for index in range(count)]
    bars = "".join(" " if value is None else BARS[min(int(value * len(BARS)), len(BARS) - 1)] for value in sample)
    rounds = f"rounds {min(heldout)} to {max(heldout)}" if last else f"round {min(heldout)}"
    return f"{bars} {rounds}{f', {count} of {len(values)}' if count < len(values) else ''}"


def _highest(heldout: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the highest success with its interval, the earliest of equal ones: `0.500 [0.250, 0.750] round 4`."""
    from flows.experiment.early_stopping import best_of
    from flows.reporting.results import with_interval

    index = best_of([summary["success"]["mean"] for summary in heldout.values()])
    if index is None:
        return MISSING
    number, summary = list(heldout.items())[index]
    return f"{with_interval(summary['success'])} round {number}"


def _table(title: str, rows: Sequence[Sequence[str]], runs: Sequence[ComparedRun]) -> Table:
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


def _difference(against: BaselineComparison) -> list[str]:
    from flows.reporting.results import interval

    lines = [f"{against.title}: {note}" for note in against.notes]
    if (paired := against.difference) is not None:
        change = f"{paired['difference']:+.3f} {interval(paired)}"
        lines.insert(0, f"{against.title}: success {change} on {paired['n']} shared scenarios")
        lines += (
            []
            if against.sides
            else [
                f"  {len(names)} {direction}{': ' if names else ''}{join_names(names)}"
                for direction, names in (("better", against.improved), ("worse", against.regressed))
            ]
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an error in the command."""
    parser = RootParser(
        prog="python -m flows.compare",
        description="Shows runs side by side, with a verdict; the first one is the baseline. Runs with the same "
        "settings and different seeds form a side.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="id, prefix of an id, experiment's name (its latest run), or latest; or sides: A=RUN,RUN,RUN "
        "B=RUN,RUN,RUN; or a folder of recorded conversations: ROOT/served",
    )
    add_store_trust(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="file of the page (default: ROOT/compare/IDS.html)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_intermixed_args(argv)
    from components.pages.comparison import render

    folder = Path(options.runs[0]).expanduser()
    if len(options.runs) == 1 and files(folder):
        versions = production.served_versions(folder)
        print(json.dumps(production.to_json(versions)) if options.json else production.to_text(versions))
        return 0
    try:
        sides = stated_sides(options.runs)
        references = options.runs if sides is None else [run for runs in sides.values() for run in runs]
        comparison = compare(options.root, references, sides, options.trust)
        html = options.html or options.root / "compare" / f"{'-'.join(run.short for run in comparison.runs)}.html"
        html = write_page(html, render(comparison))
    except EspalierError as error:
        print_message(error)
        return 2
    print(
        json.dumps(to_json(comparison, html)) if options.json else show(comparison, html),
        end="\n" if options.json else "",
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
