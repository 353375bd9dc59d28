"""Sizes of tau-bench's domains and of Espalier's own service desks, side by side.

    python -m tests.conformance.tau_sizes --data FOLDER --tokenizer tokenizer.json [--json]

Lengths are those of the solvers' episodes, with everything that the model reads and writes, tools included.
"""

from __future__ import annotations

import argparse
import json
from statistics import fmean, median
from typing import Any

from components.environments.service.airline import Airline
from components.environments.service.retail import Retail
from components.environments.tau_bench import TauBench
from components.trajectories.schema import Scenario


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.tau_sizes", description=__doc__)
    parser.add_argument("--data", required=True, help="folder with the published data")
    parser.add_argument("--tokenizer", required=True, help="file tokenizer.json of a model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(options.tokenizer)
    worlds: dict[str, Any] = {
        "tau_bench retail": TauBench(options.data, "retail"),
        "retail": Retail(),
        "tau_bench airline": TauBench(options.data, "airline", train_share=0),
        "airline": Airline(),
    }
    rows = {name: measured(world, tokenizer) for name, world in worlds.items()}
    if options.json:
        print(json.dumps(rows))
        return
    print("| | " + " | ".join(rows) + " |\n|---|" + "---|" * len(rows))
    for key in next(iter(rows.values())):
        print(f"| {key} | " + " | ".join(f"{row[key]:,}" for row in rows.values()) + " |")


def measured(world: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the figures of an environment."""

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    heldout = list(world.scenarios("heldout"))
    episodes = [solved(world, scenario) for scenario in heldout]
    lengths = [tokens("\n".join(texts)) for _, _, texts in episodes]
    return {
        "training scenarios": len(world.scenarios("train")),
        "held-out scenarios": len(heldout),
        "tools": len(world.tools()),
        "policy, tokens": tokens(world.system),
        "tools, tokens": tokens(json.dumps(world.tools())),
        "solver's actions, mean": round(fmean(actions for actions, _, _ in episodes), 1),
        "solver's actions, maximum": max(actions for actions, _, _ in episodes),
        "solver's calls, mean": round(fmean(calls for _, calls, _ in episodes), 1),
        "solver's episode, tokens, median": round(median(lengths)),
        "solver's episode, tokens, maximum": max(lengths),
    }


def solved(world: Any, scenario: Scenario) -> tuple[int, int, list[str]]:
    """Return the actions and calls of the solver's episode, and its texts."""
    texts = [json.dumps(world.tools()), *(message["content"] for message in world.reset(scenario))]
    actions = calls = 0
    for action in world.solve(scenario):
        step = world.step(action)
        made = action.get("tool_calls") or []
        actions, calls = actions + 1, calls + len(made)
        texts += [action.get("content") or "", *(json.dumps(call["function"]) for call in made)]
        texts += [message["content"] for message in step.observation]
        if step.done:
            break
    return actions, calls, texts


if __name__ == "__main__":
    main()
