"""`python -m flows.plan +experiment=NAME [overrides]`: what a run would do, before it does it.

Each stage with its inputs: is it in the store already, will it go on from an earlier try, or will it run, and why:
which part of its key differs from the nearest stage of an earlier run. Where it would run, how long that took before
and what it costs (`flows.planning.plan` says how it knows). Nothing is started, nothing written, no model is loaded and
torch is not imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from components.errors import EspalierError, ResourceError, SpecError
from flows.planning.plan import Plan, plan
from flows.terminal.arguments import refuse_root_option


def show(planned: Plan) -> str:
    """The plan as text."""
    from rich.console import Console
    from rich.table import Table

    from flows.terminal.console import duration, printable

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "from", "", "where", "episodes", "time", "cost", "why"):
        table.add_column(name, overflow="fold", ratio=1 if name == "why" else None)
    marks = {"cached": "found", "unfinished": "goes on", "run": "runs"}
    for one in planned.stages:
        table.add_row(
            printable(one.label),
            printable(", ".join(one.inputs.values())),
            marks[one.status],
            "" if one.status == "cached" else one.where + (f", beside {one.beside}" if one.beside else ""),
            "" if one.status == "cached" or one.episodes is None else str(one.episodes),
            "" if one.status == "cached" else _or_unknown(one.seconds, duration),
            "" if one.status == "cached" else _or_unknown(one.cost, "{:.2f}".format),
            printable("; ".join(one.why)),  # it quotes manifests, which another machine may have written
        )
    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    with out.capture() as text:
        out.print(table)
    known = [one.seconds - one.unnoticed for one in planned.stages if one.seconds is not None]
    unknown = len(planned.stages) - len(known)
    costs = [one.cost for one in planned.stages if one.cost is not None]
    least, more = ("at least " if len(found) < len(planned.stages) else "" for found in (known, costs))
    time_and_cost = f"{least}{duration(sum(known))}, cost {more}{sum(costs):.2f}"
    total = (
        f"{planned.experiment}: {'at most ' if planned.at_most else ''}{len(planned.stages)} stages, "
        f"{planned.count('cached')} found, "
        f"{planned.count('run') + planned.count('unfinished')} to run; "
        f"{time_and_cost if sum(known) or not unknown else 'time and cost are not known'}"
    )
    if unknown:
        total += f"; the time of {unknown} is not known, for nothing like them has run below {planned.root}"
    if len(costs) < len(known):
        total += f"; what {len(known) - len(costs)} of the others cost is not known"
    return "\n".join([f"{text.get()}{total}", *planned.notes]) + "\n"


def _or_unknown(value: float | None, form: Any) -> str:
    return "?" if value is None else str(form(value))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake in the configuration."""
    from flows.experiment.compose import check

    parser = argparse.ArgumentParser(
        prog="python -m flows.plan",
        description="Says what a run would do: which stages are there, which will run, why, how long, at what cost.",
    )
    parser.add_argument("overrides", nargs="*", help="as for flows.run: +experiment=NAME key=value")
    parser.add_argument("--config-dir", "-cd", help="folder of your own config groups")
    parser.add_argument("--fork", metavar="RUN@STEP", help="begin with the policy of another run; the same as fork=")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    overrides = [*options.overrides, *([f"fork={options.fork}"] if options.fork else [])]
    try:
        planned = plan(check(overrides, config_dir=options.config_dir, named=True)[0])
    except (SpecError, ResourceError) as error:
        print(error, file=sys.stderr)
        return 2
    except EspalierError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(planned.to_json()) if options.json else show(planned), end="\n" if options.json else "")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
