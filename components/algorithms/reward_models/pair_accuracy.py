"""Figures of a Bradley-Terry model on pairs: accuracy by epoch, and calibration on held-out pairs.

The model prefers one answer of a pair with probability σ(|m|) of being right, where m is the difference of the two
scores. It is calibrated if, among pairs of about the same probability, that share is ranked right:

    calibration_error = Σ_b n_b / n · |observed_b - predicted_b|      over bins b of the probability, each 0.1 wide
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

BINS = 5
"""Bins of the probability between 1/2 and 1."""


def calibration(margins: Sequence[float]) -> dict[str, float]:
    """Return predicted probability, observed share and number of pairs of each bin that has any, as
    `calibration/0.7/observed` for the bin that begins at 0.7, and `calibration_error`. margins: score of the better
    answer minus that of the worse one; 0 is half right."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for margin in margins:
        predicted = 1 / (1 + math.exp(-abs(margin)))
        place = min(int((predicted - 0.5) * 2 * BINS), BINS - 1)
        bins.setdefault(place, []).append((predicted, (math.copysign(1, margin) + 1) / 2 if margin else 0.5))
    figures: dict[str, float] = {}
    error = 0.0
    for place, pairs in sorted(bins.items()):
        predicted, observed = (fmean(column) for column in zip(*pairs, strict=True))
        name = f"calibration/{0.5 + place / (2 * BINS):.1f}"
        figures |= {f"{name}/predicted": predicted, f"{name}/observed": observed, f"{name}/pairs": float(len(pairs))}
        error += len(pairs) / len(margins) * abs(observed - predicted)
    return figures | ({"calibration_error": error} if margins else {})


def by_epoch(
    steps: Sequence[Mapping[str, float]], epochs: int, examples: int, batch_size: int, final: float | None
) -> dict[str, float]:
    """Return the share of training pairs that are ranked right when a step reads them, and the held-out accuracy at the
    end of the epoch, as `epoch/1/accuracy` and `epoch/1/heldout_accuracy`.

    steps: metrics of all gradient steps. examples: training examples. final: held-out accuracy after the last step."""
    figures: dict[str, float] = {}
    size = len(steps) // epochs
    for epoch in range(epochs):
        of_epoch = steps[epoch * size : (epoch + 1) * size]
        sizes = [min(batch_size, examples - place * batch_size) for place in range(size)]
        right = [(step["accuracy"], count) for step, count in zip(of_epoch, sizes, strict=True) if "accuracy" in step]
        held_out = final if epoch == epochs - 1 else of_epoch[-1].get("heldout_accuracy") if of_epoch else None
        if right:
            total = math.fsum(accuracy * count for accuracy, count in right)
            figures[f"epoch/{epoch + 1}/accuracy"] = total / sum(count for _, count in right)
        if held_out is not None:
            figures[f"epoch/{epoch + 1}/heldout_accuracy"] = held_out
    return figures
