"""Results of the recipes: docs/results/recipes.json, and the table on docs/results/recipes.md.

    python -m docs.recipes run NAME [NAME ...] [--seeds 0 1 2] [--root DIR] [--jobs N] [-- OVERRIDE ...]
    python -m docs.recipes flat NAME "REASON"
    python -m docs.recipes

`run` runs the experiments for each seed and records their results; `flat` records why one learned nothing; without
arguments the page and its plot are written again. A record has one object for each experiment and seed: `experiment`,
`seed`, `metric`, `before`, `after`, `gain` with its paired `interval`, `seconds`, `peak_memory_gb`, `command`,
`commit`, `processor`, `jobs` (runs at the same time), and `flat`: null, or the reason why nothing was learned.
`before` is the policy that the recipe's last training phase starts from: after the supervised warmup, if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from statistics import fmean
from typing import Any

from components.evaluation.metrics import mean_interval
from docs.generated import Generated, table
from docs.recipes_plot import plot
from docs.results import ROOT, commit, processor

RECORD = ROOT / "docs" / "results" / "recipes.json"
UNEXPLAINED = "the interval of the gain includes 0"


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m docs.recipes", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser("run")
    run.add_argument("names", nargs="+")
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run.add_argument("--root", help="folder of the runs, which share the stages that they have in common")
    run.add_argument("--jobs", type=int, default=1, help="runs at the same time, each on one CPU core if several")
    flat = commands.add_parser("flat")
    flat.add_argument("name")
    flat.add_argument("reason")
    own, _, overrides = " ".join(map(shlex.quote, arguments)).partition(" -- ")
    options = parser.parse_args(shlex.split(own))
    failed: list[str] = []
    if options.command == "run":
        failed = run_all(options, shlex.split(overrides))
    elif options.command == "flat":
        explain(options.name, options.reason)
    for page in (SUMMARY, PAGE):
        page.write()
    PLOT.write_text(plot(by_experiment()), encoding="utf-8")
    if failed:
        sys.exit(f"not recorded, because the run failed: {', '.join(failed)}")


def run_all(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    """Run the experiments for the seeds, and record each when it ends. Return those that failed."""
    options.commit = commit()
    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {
            pool.submit(run_experiment, name, seed, options, overrides): f"{name} seed {seed}"
            for seed in options.seeds
            for name in options.names
        }
        for done in as_completed(runs):
            if isinstance(done.exception(), subprocess.CalledProcessError):
                failed.append(runs[done])
            else:
                record(done.result())
    return failed


def run_experiment(experiment: str, seed: int, options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Run an experiment with a seed, and return its row."""
    line = [f"+experiment={experiment}", f"seed={seed}", *overrides]
    place = [f"root={options.root}"] if options.root else []
    threads = {"OMP_NUM_THREADS": "1"} if options.jobs > 1 else {}
    run = subprocess.run(
        [sys.executable, "-m", "flows.run", *line, *place],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **threads},
    )
    row = row_of(json.loads(run.stdout.splitlines()[-1]), experiment, shlex.join(["python", "-m", "flows.run", *line]))
    return row | {"jobs": options.jobs, "commit": options.commit, "processor": processor()}


def record(row: dict[str, Any]) -> None:
    """Replace the row of this experiment and seed in the record."""
    key = (row["experiment"], row["seed"])
    write([*(other for other in rows() if (other["experiment"], other["seed"]) != key), row])


def row_of(result: dict[str, Any], experiment: str, command: str) -> dict[str, Any]:
    """Return the row of a run from its result line."""
    before = result["success_sft"] if result["success_sft"] is not None else result["success_start"]
    interval = result["gain_interval"]
    return {
        "experiment": experiment,
        "seed": result["seed"],
        "metric": "held-out success",
        "before": before,
        "after": result["success"],
        "gain": result["gain"],
        "interval": interval,
        "seconds": result["seconds"],
        "peak_memory_gb": result["peak_memory_gb"],
        "command": command,
        "flat": None if interval is not None and interval[0] > 0 else UNEXPLAINED,
    }


def explain(experiment: str, reason: str) -> None:
    """Record why the runs of an experiment whose gain is not above 0 learned nothing."""
    write([row | {"flat": reason} if row["experiment"] == experiment and row["flat"] else row for row in rows()])


def rows() -> list[dict[str, Any]]:
    """Return the recorded rows."""
    return list(json.loads(RECORD.read_text(encoding="utf-8"))) if RECORD.is_file() else []


def write(new: list[dict[str, Any]]) -> None:
    """Write the record, sorted by experiment and seed."""
    new.sort(key=lambda row: (row["experiment"], row["seed"]))
    RECORD.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


def summary_table() -> str:
    """Return a table of the means over the seeds of each experiment, with Student-t intervals of the gain."""
    head = ["Experiment", "Seeds", "Before", "After", "Gain [95 % over seeds]", "Seeds with gain", "Minutes", "Memory"]
    cells = []
    for experiment, runs in by_experiment().items():
        gain = mean_interval([row["gain"] for row in runs])
        bounds = "" if gain["low"] is None else f" [{gain['low']:+.2f}, {gain['high']:+.2f}]"
        cells.append(
            [
                f"`{experiment}`",
                str(len(runs)),
                f"{fmean(row['before'] for row in runs):.2f}",
                f"{fmean(row['after'] for row in runs):.2f}",
                f"{gain['mean']:+.2f}{bounds}",
                f"{sum(row['flat'] is None for row in runs)} of {len(runs)}",
                f"{fmean(row['seconds'] for row in runs) / 60:.1f}",
                f"{max(row['peak_memory_gb'] for row in runs):.1f} GB",
            ]
        )
    reasons = {row["experiment"]: row["flat"] for row in rows() if row["flat"]}
    flat = "".join(f"\n- `{name}`: {reason}" for name, reason in reasons.items())
    return table(head, cells) + (f"\nSeeds without gain:\n{flat}\n" if flat else "")


def results_table() -> str:
    """Return the table of the recorded results."""
    head = ["Experiment", "Seed", "Before", "After", "Gain [95 %]", "Seconds", "Runs at once", "Commit"]
    cells = [
        [
            f"`{row['experiment']}`",
            str(row["seed"]),
            f"{row['before']:.3f}",
            f"{row['after']:.3f}",
            f"{row['gain']:+.3f} [{row['interval'][0]:+.3f}, {row['interval'][1]:+.3f}]",
            f"{row['seconds']:.0f}",
            str(row["jobs"]),
            row["commit"],
        ]
        for row in rows()
    ]
    processors = ", ".join(sorted({row["processor"] for row in rows()}))
    return f"{table(head, cells)}\nProcessors: {processors or 'none'}.\n"


def by_experiment() -> dict[str, list[dict[str, Any]]]:
    """Return the rows by experiment, ordered by mean success after training, best first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows():
        groups.setdefault(row["experiment"], []).append(row)
    return dict(sorted(groups.items(), key=lambda item: -fmean(row["after"] for row in item[1])))


PAGE = Generated("results/recipes.md", "recipes-table", results_table)
SUMMARY = Generated("results/recipes.md", "recipes-summary", summary_table)
PLOT = RECORD.with_name("recipes.svg")

if __name__ == "__main__":
    main(sys.argv[1:])
