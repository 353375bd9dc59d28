"""Evaluations that stop when they are decided, by simulation: docs/results/sequential.json, and the table on
docs/guides/sequential.md.

    python -m docs.sequential simulate [--runs 4000]
    python -m docs.sequential

`simulate` draws the outcomes of two policies on the scenarios of an evaluation, independently for each scenario: a
share `changed` of the scenarios is solved by exactly one of the two, and the success of the second is `gain` above that
of the first. The evaluation looks after each batch, as `evaluate.stop=decided` does. Recorded are the runs that are
decided, those decided for the worse policy (without a gain: for either), those whose interval misses the gain at some
look, and the scenarios that are not played. Without arguments the table is written again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import cache
from typing import Any

from components.evaluation.proportions import wilson
from components.evaluation.sequential import log_capital
from components.evaluation.spec import EvaluateSpec
from docs.generated import Generated, table
from docs.results import ROOT

RECORD = ROOT / "docs" / "results" / "sequential.json"
SCENARIOS = 256
ALPHA, BATCH = EvaluateSpec().alpha, EvaluateSpec().batch
CASES = [(0.3, 0.0), (0.3, 0.05), (0.3, 0.1), (0.3, 0.15), (0.3, 0.2), (0.4, 0.3), (0.5, 0.4), (0.15, 0.1), (0.05, 0.0)]
"""Share of scenarios that change, and gain."""


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m docs.sequential", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    simulate = commands.add_parser("simulate")
    simulate.add_argument("--runs", type=int, default=4000)
    options = parser.parse_args(arguments)
    if options.command == "simulate":
        rows = [simulated(changed, gain, options.runs) for changed, gain in CASES]
        RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write()


def simulated(changed: float, gain: float, runs: int, batch: int = BATCH) -> dict[str, Any]:
    """Return a row of the table. batch: scenarios between two looks."""
    import numpy as np

    better, worse = (changed + gain) / 2, (changed - gain) / 2
    drawn = np.random.default_rng(0).random((runs, SCENARIOS))
    counts = {1.0: (drawn < better).cumsum(1), 0.0: ((drawn >= better) & (drawn < better + worse)).cumsum(1)}
    looks = sorted({*range(batch - 1, SCENARIOS, batch), SCENARIOS - 1})
    decided, wrong, missed, played = 0, 0, 0, 0
    for run in range(runs):
        at_looks = [(int(counts[1.0][run, look]), int(counts[0.0][run, look]), look + 1) for look in looks]
        end = next((index for index, (won, lost, n) in enumerate(at_looks) if excludes(won, lost, n, 0.0)), None)
        won, lost, n = at_looks[-1 if end is None else end]
        decided += end is not None
        wrong += end is not None and (gain == 0 or won < lost)
        missed += any(excludes(*counts_at, gain) for counts_at in at_looks)
        played += n
    return {"changed": changed, "gain": gain, "runs": runs, "decided": decided, "wrong": wrong, "missed": missed,
            "played": played / runs}  # fmt: skip


@cache
def excludes(won: int, lost: int, scenarios: int, gain: float) -> bool:
    """Return True if the confidence sequence excludes a gain after these scenarios."""
    values = {1.0: won, 0.0: lost, 0.5: scenarios - won - lost}
    return log_capital(values, (1 + gain) / 2) >= math.log(1 / ALPHA)


def sequential_table() -> str:
    """Return the table of the recorded simulation."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    head = [
        "Scenarios that change",
        "Gain",
        "Decided",
        "Wrong",
        "Interval misses the gain",
        "Scenarios played",
        "Saved",
    ]
    cells = [
        [
            percent(row["changed"]),
            f"{row['gain']:+.2f}" if row["gain"] else "0",
            percent(row["decided"] / row["runs"]),
            share(row["wrong"], row["runs"]),
            share(row["missed"], row["runs"]),
            f"{row['played']:.0f} of {SCENARIOS}",
            percent(1 - row["played"] / SCENARIOS),
        ]
        for row in rows
    ]
    return table(head, cells)


def percent(value: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * value:.0f} %"


def share(count: int, runs: int) -> str:
    """Return a share with its 95 % interval."""
    low, high = wilson(count, runs)
    return f"{100 * count / runs:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


PAGE = Generated("guides/sequential.md", "sequential", sequential_table)

if __name__ == "__main__":
    main(sys.argv[1:])
