"""Whether a policy that learns from RULER alone gets as far as one that learns from the hand-written reward.

    python -m tests.benchmarks.ruler_learning [--seeds 0 1 2] [--json] [-- OVERRIDES]

The quickstart runs twice for each seed: with the environment's success as reward, and with `reward=ruler` against a
judge that knows the answer. That judge speaks OpenAI's chat completions over a socket; it sees what any judge sees, the
prompt, and plays each trajectory again in a shop of its own to know what came of it. Like a judge that is good and no
more, it does not say success and failure but 0.9 to 1 for those that succeed, by how short they were, and up to 0.3 for
what was done right by those that do not.

    success         held-out success of both, by seed
    points          mean success with RULER less that with the hand-written reward, in points of a hundred

All that does not depend on the reward is shared, as always: collect[sft] is played once for both.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from components.environments.worlds.shop import Shop
from components.trajectories.schema import Scenario
from tests.rewards.judge_server import Asked, Reply, judge_server

CODE = Path(__file__).resolve().parents[2]
CONTEXT = re.compile(r"<context>\n(.*?)\n</context>", re.DOTALL)
BLOCK = re.compile(r'<trajectory id="([^"]*)">\n(.*?)\n</trajectory>', re.DOTALL)
SHORTEST = 4
"""Messages of the shortest way: find the order, check the policy, act, answer."""


class KnowingJudge:
    """Scores trajectories of the shop."""

    def __init__(self) -> None:
        shop = Shop()
        every = [*shop.scenarios("train"), *shop.scenarios("heldout")]
        self._scenarios = {one.input["request"]: one for one in every}

    def __call__(self, asked: Asked) -> Reply:
        context = CONTEXT.search(asked.prompt)
        before = json.loads(context[1]) if context else []
        scores = []
        for name, text in BLOCK.findall(asked.prompt):
            messages = [*before, *json.loads(text)]
            scores.append({"trajectory_id": name, "explanation": "It was played again.", "score": self.score(messages)})
        return Reply(say=json.dumps({"scores": scores}))

    def score(self, messages: list[dict[str, Any]]) -> float:
        request = next(one["content"] for one in messages if one["role"] == "user")
        scenario = next(known for said, known in self._scenarios.items() if said in request)
        said = [one for one in messages if one["role"] == "assistant"]
        end = played_again(scenario, said)
        if end["success"]:
            return 1.0 - min(0.02 * max(len(said) - SHORTEST, 0), 0.1)
        return 0.2 * end["state"] + 0.1 * any(
            call["tool"] == "find_order" for one in said for call in one.get("calls", ())
        )


def played_again(scenario: Scenario, said: list[dict[str, Any]]) -> dict[str, Any]:
    """The outcome."""
    shop = Shop()
    shop.reset(scenario)
    end: dict[str, Any] = {"success": False, "state": False}
    for message in said:
        calls = [
            {"id": str(i), "function": {"name": call["tool"], "arguments": json.dumps(call["arguments"])}}
            for i, call in enumerate(message.get("calls", ()))
        ]
        step = shop.step({"content": message.get("content", ""), "tool_calls": calls})
        end = step.info
    return end


def run(*overrides: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "flows.run", "+experiment=quickstart", *overrides]
    done = subprocess.run(command, cwd=CODE, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", action="store_true", help="on one line")
    parser.add_argument("overrides", nargs="*", help="of both runs")
    options = parser.parse_args()
    success: dict[str, dict[str, float]] = {"written": {}, "ruler": {}}
    with tempfile.TemporaryDirectory() as new, judge_server(KnowingJudge()) as server:
        asked = ["reward=ruler", f"reward.model.url={server.url}", "reward.model.model=judge"]
        for seed in options.seeds:
            shared = [f"seed={seed}", f"root={new}", *options.overrides]
            for name, own in (("written", []), ("ruler", asked)):
                success[name][str(seed)] = run(*shared, *own)["success"]
                print(f"seed {seed}, {name}: {success[name][str(seed)]:.4f}", file=sys.stderr, flush=True)
        calls = len(server.requests)
    means = {name: fmean(found.values()) for name, found in success.items()}
    found = {"success": success, "points": round(100 * (means["ruler"] - means["written"]), 2), "calls": calls}
    print(json.dumps(found) if options.json else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
