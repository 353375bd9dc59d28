"""The metrics of a training from those of its gradient steps."""

from __future__ import annotations

from collections.abc import Sequence

from components.algorithms.policy.packing import Pack

ADDED = {"skipped_steps", "overflowed_steps", "sampled_tokens", "tokens", "computed_tokens", "seconds"}
"""Counts and seconds; of everything else the mean is taken."""


def of_packs(packs: Sequence[Pack]) -> dict[str, float]:
    """Tokens that are learned from, tokens as they would count without sharing, tokens that are computed."""
    return {
        "sampled_tokens": float(sum(len(one.token_S) for one in packs)),
        "tokens": float(sum(sum(one.lengths) for one in packs)),
        "computed_tokens": float(sum(one.computed for one in packs)),
    }


def over_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the steps that have it (a step that was left out has no loss); `ADDED` are added up.
    Without any step, `skipped` says so."""
    if not steps:
        return {"skipped": 1.0}
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    del values["step"]
    means = {name: sum(found) / (1 if name in ADDED else len(found)) for name, found in values.items()}
    return means | {"tokens_per_s": means["tokens"] / means["seconds"]}
