"""Conformance of tau-bench's tools and reward with the published data.

    python -m tests.conformance.tau_bench --data FOLDER [--json]

Three comparisons, none with a language model. Gold: the solver of each task must get reward 1. Recorded: each call of
the recorded airline episodes must give the recorded answer, and each episode the recorded reward. Displayed: the
answers of the displayed retail conversations must follow from calls derived from them. The exit code is 0 if
everything is equal, 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from components.environments.tau_bench import TauBench
from components.environments.tools import InvalidAction, run_tool
from components.errors import EspalierError
from components.trajectories.schema import Scenario
from tests.conformance.tau_displayed import reconstruct
from tests.conformance.tau_recorded import replay_recorded

SHOWN = 300
"""Maximum number of characters of an answer that is printed."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.tau_bench", description=__doc__)
    parser.add_argument("--data", required=True, help="folder with the published data")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        report = {
            "gold": [*gold(options.data, "retail"), *gold(options.data, "airline")],
            "recorded": replay_recorded(options.data),
            "displayed": reconstruct(options.data),
        }
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"--data {options.data}: {error}; expected the recorded conversations of tau-bench", file=sys.stderr)
        return 2
    report["equal"] = all(row["reward_1"] == row["tasks"] for row in report["gold"]) and not (
        report["recorded"]["differences"] or report["displayed"]["differences"]
    )
    print(json.dumps(report) if options.json else text(report))
    return 0 if report["equal"] else 1


def gold(folder: str, domain: str) -> list[dict[str, Any]]:
    """Return counts of the gold actions of each published split."""
    published = ("dev", "test") if domain == "retail" else ("test",)
    environment = TauBench(folder, domain, published, train_share=0)
    rows: dict[str, dict[str, Any]] = {}
    for scenario in [*environment.scenarios("train"), *environment.scenarios("heldout")]:
        row = rows.setdefault(
            scenario.id.split("-")[1],
            {"tasks": 0, "reward_1": 0, "gold_actions": 0, "gold_errors": [], "unchanged": 0, "nothing_required": 0},
        )
        row["tasks"] += 1
        row["reward_1"] += asyncio.run(solves(environment, scenario))
        unchanged = not any(environment.gold().changes().values())
        row["unchanged"] += unchanged
        row["nothing_required"] += unchanged and not scenario.input["outputs"]
        environment.reset(scenario)
        for action in scenario.input["actions"]:
            row["gold_actions"] += 1
            try:
                run_tool(environment.toolbox(), action["name"], action["kwargs"])
            except InvalidAction as error:
                row["gold_errors"].append({"task": scenario.id, "tool": action["name"], "error": str(error)})
    return [{"domain": domain, "split": split, **row} for split, row in rows.items()]


async def solves(environment: TauBench, scenario: Scenario) -> bool:
    """Return True if the solver gets reward 1."""
    environment.reset(scenario)
    success = False
    for action in environment.solve(scenario):
        success = environment.step(action).info["success"]
    return success


def text(report: dict[str, Any]) -> str:
    """Return the report as text."""
    lines = ["Gold actions:  domain  split  tasks  reward 1  actions  errors  database unchanged  nothing required"]
    for row in report["gold"]:
        errors = len(row["gold_errors"])
        lines.append(
            f"               {row['domain']:<7} {row['split']:<5} {row['tasks']:>6} {row['reward_1']:>9} "
            f"{row['gold_actions']:>8} {errors:>7} {row['unchanged']:>19} {row['nothing_required']:>17}"
        )
    recorded, displayed = report["recorded"], report["displayed"]
    lines += ["", f"Recorded airline episodes: {recorded['episodes']}"]
    for kind in ("reward", "database", "gold_digest"):
        lines.append(f"  {kind + 's':<32}{recorded[f'equal_{kind}s']:>5} of {recorded[f'{kind}s']:>5} equal")
    lines.append(f"  {'tool answers':<32}{recorded['equal']:>5} of {recorded['calls']:>5} equal")
    lines += [
        f"    {name:<30}{row['equal']:>5} of {row['calls']:>5}" for name, row in sorted(recorded["tools"].items())
    ]
    lines += ["", f"Displayed retail conversations: {displayed['conversations']}"]
    lines.append(f"  {'tool answers':<32}{displayed['equal']:>5} of {displayed['answers']:>5} equal")
    lines += [
        f"    {name:<30}{row['equal']:>5} of {row['answers']:>5}" for name, row in sorted(displayed["tools"].items())
    ]
    lines.append(f"  {'without a derivable call':<32}{displayed['not_derivable']:>5}")
    for difference in [*recorded["differences"], *displayed["differences"]]:
        lines.append("")
        lines += [f"{key}: {value!s:.{SHOWN}}" for key, value in difference.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
