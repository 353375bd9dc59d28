"""Held-out success of the quickstart with other values of keys whose defaults are in question.

    python -m tests.benchmarks.quickstart_defaults --json | python -m docs.defaults add

Each variant is trained with three seeds: about eight minutes each on two cores. What a variant shares with another,
such as the warmup, is computed once; an interrupted measurement goes on with the same `--root`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 2)
SCENARIOS = 96
"""Held-out scenarios of each evaluation."""
VARIANTS: dict[str, tuple[str, ...]] = {
    name: tuple(f"algorithm.{override}" for override in name.split())
    for name in (
        "scale=group clip_high=0.2 dual_clip=null",
        "scale=group clip_high=0.2 dual_clip=3",
        "scale=batch clip_high=0.2 dual_clip=3",
        "scale=group clip_high=0.28 dual_clip=3",
        "scale=batch clip_high=0.28 dual_clip=3",
    )
}
"""Overrides by the name of their row. Every row says each of the keys, so that it means the same under any default."""


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of the result that a run prints."""
    return {"success": result["success"], "success_sft": result["success_sft"], "scenarios": SCENARIOS}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs", help="folder of the runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, Any]] = {}
    for name, overrides in VARIANTS.items():
        for seed in SEEDS:
            chosen = [f"seed={seed}", f"evaluate.scenarios={SCENARIOS}", f"root={Path(options.root).absolute()}"]
            command = [sys.executable, "-m", "flows.run", "+experiment=quickstart", *chosen, *overrides]
            run = subprocess.run(command, cwd=CODE, stdout=subprocess.PIPE, check=True)
            results.setdefault(name, {})[str(seed)] = summary(json.loads(run.stdout.splitlines()[-1]))
            if not options.json:
                print(name, seed, results[name][str(seed)], flush=True)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
