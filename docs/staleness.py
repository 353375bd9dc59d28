"""Success of the quickstart by `collect.overlap` and `collect.partial`, in docs/guides/asynchrony.md.

    python -m flows.run +experiment=quickstart seed=0 collect.overlap=2 deploy=none | python -m docs.staleness add
    python -m flows.run +experiment=quickstart seed=0 collect.overlap=1 'collect.partial={groups: 4, rounds: 2}' \
        deploy=none | python -m docs.staleness add '1, {groups: 4, rounds: 2}'
    python -m docs.staleness                                                         write the table

An argument after `add` is the setting of the row; without one it is the largest age, which is `collect.overlap`. The
rows without overlap are the recorded results of the quickstart (docs/results.py).
"""

from __future__ import annotations

import sys
from typing import Any

from docs.recorded import Known, Recorded
from docs.results import recorded

STALENESS = "policy versions behind, at most"
KEPT = ("seed", "success", "success_interval", "success_sft", "gain", "gain_interval", "training_reward_by_round")


def _merged(known: Known, result: Known) -> Known:
    """Add the result of a run, under its setting and seed."""
    setting = (sys.argv[2:] or [str(int(result["reported"][STALENESS]))])[0]
    return known | {f"{setting}/{result['seed']}": {name: result[name] for name in KEPT}}


def _rows(known: Known) -> list[list[str]]:
    results = {f"0/{result['seed']}": result for result in recorded()} | known
    return [
        _row(key.partition("/")[0], results[key])
        for key in sorted(results, key=lambda key: (results[key]["seed"], key))
    ]


def _row(setting: str, result: dict[str, Any]) -> list[str]:
    low, high = result["success_interval"]
    gain_low, gain_high = result["gain_interval"]
    return [
        str(result["seed"]),
        setting,
        f"{result['success_sft']:.3f}",
        f"{result['success']:.3f} [{low:.3f}, {high:.3f}]",
        f"{result['gain']:+.3f} [{gain_low:+.3f}, {gain_high:+.3f}]",
        ", ".join(f"{value:.2f}" for value in result["training_reward_by_round"].values()),
    ]


TABLE = Recorded(
    "guides/asynchrony.md",
    "staleness",
    "staleness.json",
    ["Seed", "`collect.overlap`, `partial`", "After SFT", "After GRPO", "Gain", "Reward of sampled episodes by round"],
    _rows,
    merged=_merged,
)

if __name__ == "__main__":
    TABLE.main(sys.argv[1:2])
