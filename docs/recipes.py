"""Results of the recipes: docs/results/recipes.json, and the table on docs/results/recipes.md.

    python -m docs.recipes run NAME [NAME ...] [--seeds 0 1 2] [--root DIR] [--jobs N] [-- OVERRIDE ...]
    python -m docs.recipes flat NAME "REASON"
    python -m docs.recipes

`run` runs the experiments for each seed and records their results; `flat` records why one learned nothing; without
arguments the table is written again. A record has one object for each experiment and seed: `experiment`, `seed`,
`metric`, `before`, `after`, `gain` with its paired `interval`, `seconds`, `peak_memory_gb`, `command`, `commit`,
`processor`, and `flat`: null, or the reason why nothing was learned. `before` is the policy that the recipe's last
training phase starts from: after the supervised warmup, if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from docs.generated import Generated, table
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
    if options.command == "run":
        chosen = [(name, seed) for seed in options.seeds for name in options.names]
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = [pool.submit(run_experiment, name, seed, options, shlex.split(overrides)) for name, seed in chosen]
            for done in as_completed(runs):
                record(done.result())
    elif options.command == "flat":
        explain(options.name, options.reason)
    PAGE.write()


def run_experiment(experiment: str, seed: int, options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Run an experiment with a seed, and return its row."""
    recorded_commit = commit()
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
    return row | {"jobs": options.jobs, "commit": recorded_commit, "processor": processor()}


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


def results_table() -> str:
    """Return the table of the recorded results."""
    head = ["Experiment", "Seed", "Before", "After", "Gain [95 %]", "Minutes", "Memory", "Commit"]
    cells = [
        [
            f"`{row['experiment']}`",
            str(row["seed"]),
            f"{row['before']:.2f}",
            f"{row['after']:.2f}",
            f"{row['gain']:+.2f} [{row['interval'][0]:+.2f}, {row['interval'][1]:+.2f}]",
            f"{row['seconds'] / 60:.1f}",
            f"{row['peak_memory_gb']:.1f} GB",
            row["commit"],
        ]
        for row in rows()
    ]
    reasons = {row["experiment"]: row["flat"] for row in rows() if row["flat"]}
    flat = "".join(f"\n`{name}`: {reason}.\n" for name, reason in reasons.items())
    processors = ", ".join(sorted({row["processor"] for row in rows()}))
    return f"{table(head, cells)}{flat}\nProcessors: {processors or 'none'}.\n"


PAGE = Generated("results/recipes.md", "recipes-table", results_table)

if __name__ == "__main__":
    main(sys.argv[1:])
