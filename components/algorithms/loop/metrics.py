"""Metrics of a training, from the metrics of its gradient steps."""

from __future__ import annotations

from collections.abc import Sequence

from components.algorithms.policy.packing import Pack, PackPlan

SUMMED_METRICS = {"skipped_steps", "overflowed_steps", "sampled_tokens", "tokens", "computed_tokens", "seconds"}
"""Metrics that are summed over the steps; all others are averaged."""


def token_counts(packs: Sequence[Pack] | Sequence[PackPlan]) -> dict[str, float]:
    """Return the number of tokens trained on, of tokens without prefix sharing, and of computed tokens."""
    return {
        "sampled_tokens": float(sum(pack.sampled for pack in packs)),
        "tokens": float(sum(pack.tokens for pack in packs)),
        "computed_tokens": float(sum(pack.computed for pack in packs)),
    }


def mean_metrics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it (a skipped step has no loss), and the sum of those in
    `SUMMED_METRICS`. Without any step, return `skipped` = 1."""
    if not steps:
        return {"skipped": 1.0}
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    del values["step"]
    means = {name: sum(column) / (1 if name in SUMMED_METRICS else len(column)) for name, column in values.items()}
    return means | {"tokens_per_s": means["tokens"] / means["seconds"]}
