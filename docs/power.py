"""Predicted and observed share of groups with signal in the recorded recipes: docs/results/power.json, and the table
on docs/results/recipes.md.

    python -m docs.power measure --root DIR
    python -m docs.power

`measure` reads the runs of the recipes below a root. For the first round of each run it predicts the share of groups
whose outcomes differ, as `flows.plan` does for a run of a new seed: from the first round of a run of the same
experiment with another seed, with its 95 % prediction interval; and from the greedy evaluation of the run itself before
its rounds. It records both with the observed share, and with the share of groups that the filter did not drop for want
of spread in the reward. Experiments that share their first round, because it has the same key, are one row. Without
arguments the table is written again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from components.evaluation.metrics import SEED
from components.evaluation.power import Outcomes, signal_share
from components.evaluation.proportions import wilson
from docs.generated import Generated, table
from docs.results import ROOT
from flows.history.records import Records, RunRecord
from flows.history.store_reader import StoreReader, open_reader
from flows.planning.power import START, successes_of

RECORD = ROOT / "docs" / "results" / "power.json"
NO_SPREAD = "dropped/no_spread"
RESAMPLES = 1000


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m docs.power", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    measure = commands.add_parser("measure")
    measure.add_argument("--root", type=Path, required=True, help="folder of the runs of the recipes")
    options = parser.parse_args(arguments)
    if options.command == "measure":
        RECORD.write_text(json.dumps(measured(options.root), indent=1) + "\n", encoding="utf-8")
    PAGE.write()


def measured(root: Path) -> list[dict[str, Any]]:
    """Return a row for each recipe and seed that has groups in its first round, and a run of another seed."""
    records = Records(root)
    runs: dict[str, dict[int, RunRecord]] = {}
    for run in records.all():
        own = [line for line in run.overrides if not line.startswith(("root=", "seed=", "+experiment="))]
        if run.status == "FINISHED" and not own and any(stage.label == "collect[1]" for stage in run.stages):
            runs.setdefault(run.name, {}).setdefault(run.seed, run)
    rows: dict[str, dict[str, Any]] = {}
    for name, by_seed in sorted(runs.items()):
        for seed in sorted(by_seed):
            others = [other for other in sorted(by_seed) if other != seed]
            key = by_seed[seed].stage("collect[1]").key
            if key in rows:
                rows[key]["experiments"].append(name)
            elif others:
                rows[key] = row_of(name, by_seed[seed], by_seed[others[0]], root)
    return sorted(rows.values(), key=lambda row: (row["experiments"], row["seed"]))


def first_round(run: RunRecord, reader: StoreReader) -> list[Outcomes]:
    """Return the outcomes of the groups of a run's first round."""
    groups = successes_of(reader, run.stage("collect[1]").key)
    return [Outcomes(sum(group), len(group), name[1]) for name, group in groups.items()]


def signal_interval(scenarios: Sequence[Outcomes], size: int, groups: int) -> tuple[float, float]:
    """Return the 95 % prediction interval of the share in a round of `groups` new scenarios: the bootstrap over the
    measured scenarios, and the variation of the round."""
    generator = np.random.default_rng(SEED)
    count = len(scenarios)
    shares = [
        generator.binomial(groups, min(1.0, max(0.0, signal_share([scenarios[i] for i in drawn], size)))) / groups
        for drawn in generator.integers(count, size=(RESAMPLES, count))
    ]
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(low), float(high)


def row_of(name: str, run: RunRecord, source: RunRecord, root: Path) -> dict[str, Any]:
    """Return the row of a run. source: run that the prediction comes from."""
    reader, size = open_reader(root, None), run.spec["collect"]["group_size"]
    groups, known = first_round(run, reader), first_round(source, reader)
    low, high = signal_interval(known, size, len(groups))
    start = next((stage.key for stage in run.stages if stage.label in START[:1]), None)
    evaluated = successes_of(reader, start) if start else {}
    greedy = [Outcomes(sum(group), len(group), key[1]) for key, group in evaluated.items()]
    manifest = next((reader.manifest(stage.key) for stage in run.stages if stage.label == "filter[1]"), None)
    metrics = manifest["metrics"] if manifest else {}
    total = metrics.get("kept", 0.0) + metrics.get("dropped", 0.0)
    spread = 1 - metrics[NO_SPREAD] / total if NO_SPREAD in metrics else None
    return {
        "experiments": [name],
        "seed": run.seed,
        "group_size": size,
        "groups": len(groups),
        "from_seed": source.seed,
        "predicted": round(signal_share(known, size), 4),
        "interval": [round(low, 4), round(high, 4)],
        "from_evaluation": round(signal_share(greedy, size), 4) if greedy else None,
        "observed": round(fmean(0 < group.successes < group.episodes for group in groups), 4),
        "with_spread": None if spread is None else round(spread, 4),
    }


def power_table() -> str:
    """Return the table of the recorded rows, and the coverage of the intervals."""
    rows = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else []
    if not rows:
        return "No result is recorded yet.\n"
    head = [
        "Experiment",
        "Seed",
        "Group size",
        "Groups",
        "Predicted [95 %]",
        "By greedy evaluation",
        "Observed",
        "Spread",
    ]
    cells = [
        [
            ", ".join(f"`{name}`" for name in row["experiments"]),
            str(row["seed"]),
            str(row["group_size"]),
            str(row["groups"]),
            f"{row['predicted']:.2f} [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}]",
            "" if row["from_evaluation"] is None else f"{row['from_evaluation']:.2f}",
            f"{row['observed']:.2f}",
            "" if row["with_spread"] is None else f"{row['with_spread']:.2f}",
        ]
        for row in rows
    ]
    inside = sum(row["interval"][0] <= row["observed"] <= row["interval"][1] for row in rows)
    low, high = wilson(inside, len(rows))
    errors = [abs(row["predicted"] - row["observed"]) for row in rows]
    greedy = [abs(row["from_evaluation"] - row["observed"]) for row in rows if row["from_evaluation"] is not None]
    coverage = f"{inside} of {len(rows)} intervals cover the observed share ({low:.0%} to {high:.0%})".replace(
        "%", " %"
    )
    by_evaluation = f"; that by the greedy evaluation is {fmean(greedy):.3f}" if greedy else ""
    return f"{table(head, cells)}\n{coverage}. The mean absolute error is {fmean(errors):.3f}{by_evaluation}.\n"


PAGE = Generated("results/recipes.md", "power-table", power_table)

if __name__ == "__main__":
    main(sys.argv[1:])
