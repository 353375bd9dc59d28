"""Baselines of the tasks: docs/results/baselines.json, and the table "Task recipes" on docs/results/recipes.md.

    python -m docs.baselines run NAME [NAME ...] [--seeds 0 1 2] [--root DIR] [--prompted N] [--without random]
    python -m docs.baselines

`run` needs the runs of the experiments below the root (`python -m docs.recipes run NAME --root DIR`). It evaluates
random actions, the solver, the untrained model, and the policies of each run after the warmup and after the rounds, on
the same held-out scenarios, with `python -m flows.evaluate`; and a prompted model, on the first N of them.
`--without random` or `--without solver` is for environments that have none. Without arguments the page is written
again. The record has one object for each experiment: `experiment`, `scenarios`, `policies` (`success` and its
`interval` by policy, or null), `warmed_up` and `trained` (the same by seed), `prompted` (or null),
`command`, `commit` and `processor`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from components.evaluation.metrics import Estimate, seeds_difference, seeds_interval
from docs.generated import Generated, table
from docs.results import ROOT, commit, processor
from flows.history.records import Records, RunRecord

RECORD = ROOT / "docs" / "results" / "baselines.json"
FIXED = ("random", "solver", "base")
"""Policies that do not depend on the seed of a run."""
PROMPTED = "smollm2_135m"
"""Model that plays without training."""


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m docs.baselines", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser("run")
    run.add_argument("names", nargs="+")
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run.add_argument("--root", type=Path, default=ROOT / "runs", help="folder of the runs")
    run.add_argument("--prompted", type=int, default=64, help="scenarios of the prompted model; 0: without it")
    run.add_argument("--without", nargs="+", default=[], choices=["random", "solver"], help="policies left out")
    options = parser.parse_args(arguments)
    if options.command == "run":
        fixed = [name for name in FIXED if name not in options.without]
        for name in options.names:
            record(measure(name, options.seeds, options.root, options.prompted, fixed))
    PAGE.write()


def measure(experiment: str, seeds: list[int], root: Path, prompted: int, fixed: list[str]) -> dict[str, Any]:
    """Evaluate the policies of an experiment and return its row.

    prompted: scenarios of the prompted model. fixed: policies of FIXED that the environment has.
    """
    runs = {seed: recorded_run(experiment, seed, Records(root).all()).id for seed in seeds}
    names = [*fixed, *(policy for run in runs.values() for policy in (f"{run}@0", run))]
    origin = {"commit": commit(), "processor": processor()}
    row = row_of(evaluate(experiment, root, f"policies=[{','.join(names)}]"), experiment, runs)
    if prompted:
        only = [f"model={PROMPTED}", f"evaluate.scenarios={prompted}", "policies=[base]"]
        result = evaluate(experiment, root, *only)
        row["prompted"] = {"model": PROMPTED, "scenarios": result["scenarios"], **success_of(result, "base")}
    return row | origin


def recorded_run(experiment: str, seed: int, records: list[RunRecord]) -> RunRecord:
    """Return the latest finished run of an experiment with this seed and without other overrides."""
    own = {f"+experiment={experiment}", f"seed={seed}"}
    for run in records:
        overrides = {override for override in run.overrides if not override.startswith("root=")}
        if run.status == "FINISHED" and run.seed == seed and overrides == own:
            return run
    sys.exit(
        f"no finished run of {experiment} with seed {seed} below the root; "
        f"run it first: python -m docs.recipes run {experiment} --seeds {seed} --root DIR"
    )


def evaluate(experiment: str, root: Path, *arguments: str) -> dict[str, Any]:
    """Run `flows.evaluate` and return its result."""
    command = [
        sys.executable,
        "-m",
        "flows.evaluate",
        f"+experiment={experiment}",
        *arguments,
        f"root={root}",
        "--json",
    ]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(run.stdout.splitlines()[-1]))


def row_of(result: dict[str, Any], experiment: str, runs: dict[int, str]) -> dict[str, Any]:
    """Return the row of an experiment from the result of its evaluation. runs: id of the run by seed."""
    fixed = [name for name in FIXED if name in result["policies"]]
    names = ",".join([*fixed, "RUN@0", "RUN"])
    return {
        "experiment": experiment,
        "scenarios": result["scenarios"],
        "policies": {name: success_of(result, name) if name in fixed else None for name in FIXED},
        "warmed_up": {str(seed): success_of(result, f"{run}@0") for seed, run in runs.items()},
        "trained": {str(seed): success_of(result, run) for seed, run in runs.items()},
        "prompted": None,
        "command": shlex.join(["python", "-m", "flows.evaluate", f"+experiment={experiment}", f"policies=[{names}]"]),
    }


def success_of(result: dict[str, Any], policy: str) -> dict[str, Any]:
    """Return success and its interval of a policy."""
    values = result["policies"][policy]
    return {"success": values["success"], "interval": values["success_interval"]}


def record(row: dict[str, Any]) -> None:
    """Replace the row of this experiment in the record."""
    others = [other for other in rows() if other["experiment"] != row["experiment"]]
    new = sorted([*others, row], key=lambda row: row["experiment"])
    RECORD.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


def rows() -> list[dict[str, Any]]:
    """Return the recorded rows."""
    return list(json.loads(RECORD.read_text(encoding="utf-8"))) if RECORD.is_file() else []


def baselines_table() -> str:
    """Return the table of the tasks: means of trained policies over the seeds, with intervals over and within them."""
    if not rows():
        return "No result is recorded yet.\n"
    prompted = any(row["prompted"] for row in rows())
    head = ["Task", "Scenarios", "Random", *(["Prompted"] if prompted else []), "Untrained", "After SFT"]
    head += ["After GRPO", "Gain of GRPO", "Solver"]
    cells = []
    for row in rows():
        policies = row["policies"]
        before, after = _estimates(row["warmed_up"]), _estimates(row["trained"])
        trained = seeds_interval([success for success, _ in after], [interval for _, interval in after])
        cells.append(
            [
                f"`{row['experiment']}`",
                str(row["scenarios"]),
                _shown(policies["random"]),
                *([_shown(row["prompted"])] if prompted else []),
                _shown(policies["base"]),
                f"{fmean(success for success, _ in before):.2f}",
                _over_seeds(trained, ".2f"),
                _over_seeds(seeds_difference(list(zip(before, after, strict=True))), "+.2f"),
                _shown(policies["solver"]),
            ]
        )
    commits = ", ".join(sorted({row["commit"] for row in rows()}))
    processors = ", ".join(sorted({row["processor"] for row in rows()}))
    counts = ", ".join(f"{row['prompted']['scenarios']} of `{row['experiment']}`" for row in rows() if row["prompted"])
    note = f" *Prompted* is `model={PROMPTED}`, on the first scenarios: {counts}." if prompted else ""
    return f"{table(head, cells)}\nCommit {commits}; {processors}.{note}\n"


def _estimates(by_seed: dict[str, dict[str, Any]]) -> list[Estimate]:
    return [(by_seed[seed]["success"], by_seed[seed]["interval"]) for seed in sorted(by_seed)]


def _shown(measure: dict[str, Any] | None) -> str:
    if measure is None:
        return "–"
    low, high = measure["interval"]
    return f"{measure['success']:.2f} [{low:.2f}, {high:.2f}]"


def _over_seeds(mean: dict[str, Any], form: str) -> str:
    bounds = "" if mean["low"] is None else f" [{mean['low']:{form}}, {mean['high']:{form}}]"
    return f"{mean['mean']:{form}}{bounds}"


PAGE = Generated("results/recipes.md", "baselines", baselines_table)

if __name__ == "__main__":
    main(sys.argv[1:])
