"""False alarms and detection of the guard judge_drift, by simulation: docs/results/judge_drift.json, and the table on
docs/guides/judge_drift.md.

    python -m docs.judge_drift simulate [--runs 500]
    python -m docs.judge_drift

`simulate` draws runs with the anchors and the judge of `docs.simulated_judge`: groups of games with a win, a draw, a
loss or no end, whose scores an error replaces by 1 - score with probability 1 - accuracy, anew in each judgement. The
judge is swapped in the last round of a run. It records how many runs raise an alarm before the swap, and how many
raise it in the round of the swap. Without arguments the table is written again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from typing import Any

from components.evaluation.judge_drift import Scores, level, p_values
from components.evaluation.proportions import wilson
from docs.generated import Generated, table
from docs.results import ROOT

RECORD = ROOT / "docs" / "results" / "judge_drift.json"
ENDS = (1.0, 0.4, 0.2, 0.0)
"""Scores of a game by its end."""
ANCHORS, SAMPLES, ROUNDS, ALPHA = 32, 8, 10, 0.01
"""Settings of the guard, and a run of 10 rounds with groups of 8."""
ACCURACY = 0.9
"""Accuracy of the first judge."""
SWAPS = (0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
"""Accuracies of the judge after the swap; the first is no swap."""


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m docs.judge_drift", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    simulate = commands.add_parser("simulate")
    simulate.add_argument("--runs", type=int, default=500)
    options = parser.parse_args(arguments)
    if options.command == "simulate":
        rows = [simulated(accuracy, options.runs) for accuracy in SWAPS]
        RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write()


def simulated(accuracy: float, runs: int) -> dict[str, Any]:
    """Return the row of a swap to a judge of an accuracy."""
    draw = random.Random(f"{accuracy}")
    outcomes = [alarms(draw, accuracy) for _ in range(runs)]
    early, late = (sum(outcome[part] for outcome in outcomes) for part in (0, 1))
    return {"accuracy": accuracy, "runs": runs, "alarms_before": early, "alarms_at_swap": late}


def alarms(draw: random.Random, accuracy: float) -> tuple[bool, bool]:
    """Return whether a run raises an alarm in a round before the swap, and in the round of the swap."""
    groups = [[f"{group}/{sample}" for sample in range(SAMPLES)] for group in range(ANCHORS)]
    right = {episode: draw.choice(ENDS) for group in groups for episode in group}

    def judgement(accuracy: float) -> Scores:
        return {name: score if draw.random() < accuracy else 1 - score for name, score in right.items()}

    first, control = judgement(ACCURACY), judgement(ACCURACY)
    limit = level(ALPHA, ROUNDS - 1)

    def alarm(accuracy: float) -> bool:
        return min(p_values(groups, first=first, control=control, later=judgement(accuracy)).values()) <= limit

    before = [alarm(ACCURACY) for _ in range(2, ROUNDS)]
    return any(before), alarm(accuracy)


def drift_table() -> str:
    """Return the table of the recorded simulation."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    head = ["Accuracy before → after the swap", "Runs", "Alarm", "Runs with an alarm"]
    runs, early = (sum(row[name] for row in rows) for name in ("runs", "alarms_before"))
    lines = [[f"{ACCURACY:g}", str(runs), f"in rounds 2 to {ROUNDS - 1}, before the swap", share(early, runs)]]
    for row in rows:
        swap = f"{ACCURACY:g} → {row['accuracy']:g}" + (" (no swap)" if row["accuracy"] == ACCURACY else "")
        lines.append([swap, str(row["runs"]), f"in round {ROUNDS}", share(row["alarms_at_swap"], row["runs"])])
    return table(head, lines)


def share(count: int, runs: int) -> str:
    """Return a share with its 95 % interval."""
    low, high = wilson(count, runs)
    return f"{count / runs:.1%} [{low:.1%}, {high:.1%}]"


PAGE = Generated("guides/judge_drift.md", "judge-drift", drift_table)

if __name__ == "__main__":
    main(sys.argv[1:])
