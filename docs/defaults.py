"""The table in docs/reference/algorithms.md of what the quickstart reaches with other defaults.

    python -m tests.benchmarks.quickstart_defaults --json | python -m docs.defaults add
    python -m docs.defaults

See `docs.recorded`.
"""

from __future__ import annotations

import sys
from typing import Any

from components.evaluation.proportions import wilson
from docs.recorded import Recorded


def rows(known: dict[str, Any]) -> list[list[str]]:
    return [_row(name, by_seed) for name, by_seed in known.items()]


def _row(name: str, by_seed: dict[str, Any]) -> list[str]:
    results = list(by_seed.values())
    scenarios = sum(result["scenarios"] for result in results)
    successes = sum(round(result["success"] * result["scenarios"]) for result in results)
    low, high = wilson(successes, scenarios)
    by_run = [f"{by_seed[seed]['success']:.3f}" if seed in by_seed else "not run" for seed in ("0", "1", "2")]
    return [f"`{name}`", *by_run, f"{successes / scenarios:.3f} [{low:.3f}, {high:.3f}]"]


TABLE = Recorded(
    page="reference/algorithms.md",
    mark="defaults",
    record="defaults.json",
    columns=["`algorithm`", "Seed 0", "Seed 1", "Seed 2", "Together"],
    rows=rows,
)

if __name__ == "__main__":
    TABLE.main(sys.argv[1:])
