r"""`python -m flows.explain bisect GOOD BAD`: the change that made two runs differ.

    python -m flows.explain bisect GOOD BAD                    settings, data, code and packages; held-out success
    python -m flows.explain bisect GOOD BAD --metric reward    another metric of the last evaluation
    python -m flows.explain bisect GOOD BAD --dry-run          differences and planned steps, with price; runs nothing

It really runs the experiment with some of the changes, from the last artifact that the two runs share, cheapest change
first, and prints the price of each step before it. Cached stages are reused. It ends at the first change whose effect
alone reproduces the difference (docs/guides/bisect.md). Runs that do not differ beyond noise are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError
from flows.terminal.arguments import RootParser, add_trust
from flows.terminal.console import printable
from flows.terminal.exit_codes import print_error

if TYPE_CHECKING:
    from flows.bisection.bisection import Bisection, BisectionResult
    from flows.bisection.ends import Ends
    from flows.history.records import RunRecord

METRICS = ("success", "reward", "turns")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0 if a cause is known or planned; 1 if none is; 2 for an error in the command
    and for runs that cannot be bisected; 130 if interrupted."""
    parser = RootParser(
        prog="python -m flows.explain bisect", description="Finds the change that made two runs differ."
    )
    run = "id, prefix of an id, experiment's name (its latest run), or latest"
    parser.add_argument("good", metavar="GOOD", help=f"run with the expected result: {run}")
    parser.add_argument("bad", metavar="BAD", help="run with another result")
    parser.add_argument(
        "--metric", choices=METRICS, default="success", help="metric of the last evaluation (default: success)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print differences and planned steps; run nothing")
    add_trust(parser)
    parser.add_argument(
        "--max-hours", type=_hours, metavar="H", help="end before a step with which all steps would take longer"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_intermixed_args(argv)
    try:
        data, lines = bisect(options)
    except EspalierError as error:
        return print_error(error)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue from the finished stages", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(data))
    else:
        print("\n".join(map(printable, lines)))
    return 0 if data["cause"] is not None or data["verdict"] == "planned" else 1


def bisect(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the result as JSON data and as lines of text. Raises SpecError and ResourceError before anything runs, and
    KeyboardInterrupt."""
    from flows.bisection.bisection import Bisection
    from flows.bisection.ends import read_ends
    from flows.bisection.provenance import edited_stages, workspace
    from flows.bisection.step import run_step
    from flows.history.code import CodeRecords

    ends = read_ends(options.root, options.good, options.bad, options.metric, options.trust)
    _check_trust([ends.good.record, ends.bad.record], options.trust)
    edited = edited_stages(ends, CodeRecords(options.root))
    log = options.root / "logs" / f"bisect-{time.strftime('%Y%m%d-%H%M%S')}.log"
    with ExitStack() as stack:
        parent = None
        if options.dry_run and edited:
            parent = Path(stack.enter_context(TemporaryDirectory(prefix=".bisect-", dir=options.root)))
        root = workspace(options.root, ends, parent)
        bisection = Bisection(
            ends, options.root, root, lambda spec, lines: run_step(spec, lines, log), _say, options.max_hours
        )
        for line in _differences(ends, bisection, edited):
            _say(line)
        result = bisection.planned() if options.dry_run else bisection.find()
    return to_json(ends, result), conclusion(ends, result)


def _check_trust(records: Sequence[RunRecord], trust: bool) -> None:
    """Print what of the records' settings reaches out of the runs. Raises SpecError if some does and is not trusted."""
    from flows.experiment.recorded import REPLACED, reaches
    from flows.history.trust import admit

    lines: dict[str, str] = {}
    for record in records:
        for reach in reaches(record, trust, {*REPLACED, "store"}):  # the bisection has a store of its own
            lines.setdefault(reach, record.short)
    admit([f"{text} (run {short})" for text, short in lines.items()], "the runs", trust, _say)


def to_json(ends: Ends, result: BisectionResult) -> dict[str, Any]:
    """Return the result as JSON data."""
    effect = result.effect
    return {
        "verdict": result.verdict,
        "cause": result.cause,
        "effect": None if effect is None else effect.difference,
        "interval": None if effect is None else effect.interval,
        "steps": [step.to_json() for step in result.steps],
        "metric": ends.metric,
        "good": ends.good.record.id,
        "bad": ends.bad.record.id,
        "difference": ends.effect.difference,
        "difference_interval": ends.effect.interval,
        "scenarios": ends.effect.scenarios,
        "shared": ends.shared,
    }


def conclusion(ends: Ends, result: BisectionResult) -> list[str]:
    """Return the result as lines of text."""
    from flows.bisection.provenance import cause_text

    cause = result.cause
    if result.verdict == "planned":
        lines = [f"{step.change}: {step.plan.text()}" for step in result.steps]
        return lines or ["no setting differs: data, code or packages do"]
    if cause is None:
        reason = "--max-hours is spent" if result.verdict == "budget" else "a run of the bisection failed"
        return [f"no cause: {reason}"]
    share = "" if result.effect is None else f"\neffect: {ends.metric} {result.effect.text()} of {ends.effect.text()}"
    if cause["kind"] == "setting":
        text = [f"cause: {_setting(cause)}"]
    elif cause["kind"] == "combination":
        text = ["cause: only these together:", *(f"  {_setting(change)}" for change in cause["changes"])]
    else:
        first, *others = cause_text(cause)
        text = [f"cause: {first}", *others]
    return [*text, *share.strip("\n").splitlines()]


def _setting(change: dict[str, Any]) -> str:
    return "; ".join(
        f"{key}: {json.dumps(values['good'], ensure_ascii=False)} → {json.dumps(values['bad'], ensure_ascii=False)}"
        for key, values in change["settings"].items()
    )


def _differences(ends: Ends, bisection: Bisection, edited: dict[str, list[str]]) -> list[str]:
    """Return lines on the two runs and their differences."""
    from flows.bisection.provenance import differing_packages
    from flows.history.code import CodeRecords, differing_code

    good, bad = ends.good.record, ends.bad.record
    code = differing_code(CodeRecords(bisection.root), ends.common)
    packages = differing_packages(good.packages, bad.packages)
    last = f", the last one {ends.shared[-1]}" if ends.shared else ""
    lines = [
        f"GOOD {good.short} {good.name} seed {good.seed}: {ends.metric} {ends.effect.before:.3f}",
        f"BAD  {bad.short} {bad.name} seed {bad.seed}: {ends.metric} {ends.effect.after:.3f}",
        f"difference: {ends.effect.text()} on {ends.effect.scenarios} shared scenarios",
        f"shared: {len(ends.shared)} of {len(good.stages)} stages{last}",
        f"settings that differ: {len(bisection.planned_changes)}",
        *(f"  {change.text()}: {plan.text()}" for change, plan in bisection.planned_changes),
    ]
    lines += [f"code that differs in {label}: {', '.join(names)}" for label, names in code.items()]
    lines += [f"package that differs: {name}: {old} → {new}" for name, (old, new) in packages.items()]
    lines += [
        f"code has changed since {name.upper()} in {', '.join(labels)}: these stages run again"
        for name, labels in edited.items()
    ]
    if unrecorded := [run.short for run in (good, bad) if not any(stage.code for stage in run.stages)]:
        lines.append(f"code is not recorded for {', '.join(unrecorded)}: taken as unchanged")
    return lines


def _say(line: str) -> None:
    print("\n".join(map(printable, line.splitlines())), file=sys.stderr, flush=True)


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 < hours < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of hours above 0")
    return hours
