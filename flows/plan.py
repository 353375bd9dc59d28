"""`python -m flows.plan +experiment=NAME [overrides]`: dry run of an experiment.

With `seeds: [0, 1, 2]` it plans the runs of all seeds; a stage that they share is computed once, and then cached.

It lists each stage with its inputs and its status: cached, to be resumed, or to run. For a stage that runs it shows the
place, the expected time and cost (`flows.planning.plan` explains the estimates), and the first reason why it is not
cached: a part of its key that differs from the nearest stage of an earlier run. `--why` shows all reasons, and those of
an experiment that has not run yet, whose nearest stages belong to other experiments. From the success of the policy
before the rounds it predicts what the experiment can show: the share of groups with a signal, and the gain that its
evaluation detects (`flows.planning.power`). The command starts nothing, writes nothing, loads no model and does not
import torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from components.errors import EspalierError, ResourceError
from components.evaluation.power import STEP
from flows.planning.budget import sufficiency
from flows.planning.plan import plan
from flows.planning.power import plan_power
from flows.planning.power import show as show_power
from flows.planning.run_plan import PlannedStage, RunPlan
from flows.planning.sharded import PlannedShard
from flows.terminal.arguments import refuse_root_option
from flows.terminal.exit_codes import print_error

MAX_SHARDS = 8
"""Maximum number of shards of a stage that have a row each."""


def show(planned: RunPlan, *, why: bool = False) -> str:
    """Return the plan as text. why: show all reasons of each stage, else the first one, and none of a new
    experiment."""
    from rich.console import Console
    from rich.table import Table

    from flows.terminal.console import duration, printable

    table = Table(box=None, pad_edge=False, header_style="bold")
    several = len(planned.seeds) > 1
    explained = why or not planned.new
    reasons = ["why"] if explained else []
    for column in (*(["seed"] if several else []), "stage", "from", "", "where", "episodes", "time", "cost", *reasons):
        table.add_column(column, overflow="fold", ratio=1 if column == "why" else None)
    marks = {"cached": "cached", "unfinished": "resumes", "run": "runs"}
    for stage in planned.stages:
        table.add_row(
            *([str(stage.seed)] if several else []),
            printable(stage.label),
            printable(", ".join(dict.fromkeys(stage.inputs.values()))),
            marks[stage.status],
            "" if stage.status == "cached" else stage.where + (f", beside {stage.beside}" if stage.beside else ""),
            "" if stage.status == "cached" or stage.episodes is None else str(stage.episodes),
            "" if stage.status == "cached" else _or_unknown(stage.seconds, duration),
            "" if stage.status == "cached" else _or_unknown(stage.cost, "{:.2f}".format),
            # the reasons quote manifests, which another machine may have written
            *([printable(_reasons(stage.why, why))] if explained else []),
        )
        if stage.shard_count is None:
            blank = [""] * (len(table.columns) - 1 - several)
            table.add_row(*([""] if several else []), "  shards, number unknown", *blank)
        for label, state, shards in _shard_rows(stage):
            seconds, cost = shards[0].seconds, shards[0].cost
            suffix = " each" if len(shards) > 1 else ""
            table.add_row(
                *([""] if several else []),
                printable(label),
                "",
                marks[state],
                "",
                "",
                "" if state == "cached" else _or_unknown(seconds, duration) + suffix,
                "" if state == "cached" else _or_unknown(cost, "{:.2f}".format) + suffix,
                *([""] if explained else []),
            )
    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    with out.capture() as text:
        out.print(table)
    times = [stage.seconds - stage.overlapped_seconds for stage in planned.stages if stage.seconds is not None]
    unknown = len(planned.stages) - len(times)
    costs = [stage.cost for stage in planned.stages if stage.cost is not None]
    time_bound, cost_bound = ("at least " if len(values) < len(planned.stages) else "" for values in (times, costs))
    time_and_cost = f"{time_bound}{duration(sum(times))}, cost {cost_bound}{sum(costs):.2f}"
    name = planned.experiment + (f", {len(planned.seeds)} seeds" if several else "")
    total = (
        f"{name}: {'at most ' if planned.at_most else ''}{len(planned.stages)} stages, "
        f"{planned.count('cached')} cached, "
        f"{planned.count('run') + planned.count('unfinished')} to run; "
        f"{time_and_cost if sum(times) or not unknown else 'time and cost unknown'}"
    )
    if unknown:
        total += f"; time unknown for {unknown} (no similar stage has run below {planned.root})"
    if len(costs) < len(times):
        total += f"; cost unknown for {len(times) - len(costs)} of the others"
    notes = [*planned.notes]
    if not explained:
        notes.append(
            f"no earlier run of {planned.experiment} below {planned.root}; --why compares it with other experiments"
        )
    lines = [line.rstrip() for line in text.get().splitlines()]
    return "\n".join([*lines, total, *notes]) + "\n"


def _reasons(why: Sequence[str], every: bool) -> str:
    """Return the reasons of a stage as text: all, or the first one and the number of the others."""
    shown = why if every else why[:1]
    return "; ".join([*shown, *([f"{len(why) - 1} more (--why)"] if len(why) > len(shown) else [])])


def _shard_rows(stage: PlannedStage) -> Iterator[tuple[str, str, list[PlannedShard]]]:
    """Yield a label, the status and the shards of each row: up to MAX_SHARDS rows of single shards, else a row for each
    status. An estimated number of shards has one row."""
    if stage.shards and stage.shard_count_estimated:
        yield f"  about {len(stage.shards)} shards", stage.shards[0].status, stage.shards
        return
    if len(stage.shards) <= MAX_SHARDS:
        yield from (
            (f"  {shard.label.removeprefix(stage.label).strip()}", shard.status, [shard]) for shard in stage.shards
        )
        return
    for status in dict.fromkeys(shard.status for shard in stage.shards):
        shards = [shard for shard in stage.shards if shard.status == status]
        yield f"  {len(shards)} of {len(stage.shards)} shards", status, shards


def _or_unknown(value: float | None, form: Any) -> str:
    return "?" if value is None else str(form(value))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an invalid configuration; 1 for another failure."""
    from flows.experiment.compose import check

    parser = argparse.ArgumentParser(
        prog="python -m flows.plan",
        description="Shows what a run would do: which stages are cached, which run and why, expected time and cost.",
    )
    parser.add_argument("overrides", nargs="*", help="as for flows.run: +experiment=NAME key=value")
    parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")
    parser.add_argument("--fork", metavar="RUN@STEP", help="start from the policy of another run; same as fork=")
    parser.add_argument(
        "--success",
        type=_share,
        metavar="P",
        help="success of the policy before the rounds, from 0 to 1 (default: as in the most similar earlier run)",
    )
    parser.add_argument("--gain", type=_gain, metavar="D", help="gain in success that the experiment is to show")
    parser.add_argument("--why", action="store_true", help="show all reasons why a stage is not cached")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    overrides = [*options.overrides, *([f"fork={options.fork}"] if options.fork else [])]
    try:
        specs = check(overrides, config_dir=options.config_dir, named=True)
        seeds = {spec.seed for spec in specs}
        planned = plan(*specs) if len(seeds) == len(specs) else plan(specs[0])
        first = planned if len(planned.seeds) == 1 else plan(specs[0])
        if len(planned.seeds) < len(specs):
            note = "this is the plan of one point; the command is a sweep, which repeats what differs for each point"
            planned = replace(planned, notes=[*planned.notes, note])
        planned = replace(planned, notes=[*planned.notes, *sufficiency(specs[0], first)])
        power = plan_power(specs[0], first, plan, success=options.success, gain=options.gain)
        if power is None and options.gain is not None:
            raise ResourceError(
                "--gain needs the success of the policy before the rounds, and no earlier run below "
                f"{planned.root} has the same environment, agent and model: give it with --success P"
            )
    except EspalierError as error:
        return print_error(error)
    if options.json:
        print(json.dumps({**planned.to_json(), "power": power and power.to_json()}))
    else:
        print(show(planned, why=options.why), end="")
        print("".join(f"{line}\n" for line in (show_power(power) if power else [])), end="")
    return 0


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 to 1")
    return number


def _gain(text: str) -> float:
    number = _share(text)
    if number < STEP:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a gain from {STEP} to 1")
    return number


if __name__ == "__main__":
    raise SystemExit(main())
