"""End of a gradient step: the step of the optimizer, the loss scale, and the metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

from components.algorithms.loop.loss_scale import LossScale


def finish(
    optimizer: torch.optim.Optimizer,
    measured: Mapping[str, float],
    counts: Mapping[str, float],
    loss_scale: LossScale,
    *,
    skipped: bool,
    started: float,
) -> dict[str, float]:
    """Take the step, or skip it if a guard skips it or a scaled gradient overflowed. Return its metrics. started: start
    of the step on the monotonic clock."""
    overflowed = loss_scale.overflowed(measured)
    scale = {"loss_scale": loss_scale.value, "overflowed_steps": float(overflowed)} if loss_scale.enabled else {}
    if not (skipped or overflowed):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not skipped:
        loss_scale.update(overflowed)
    seconds = time.monotonic() - started
    return {
        **{name: value for name, value in measured.items() if math.isfinite(value)},
        "learning_rate": optimizer.param_groups[0]["lr"],
        "skipped_steps": float(skipped or overflowed),
        **scale,
        **counts,
        "tokens_per_s": counts["tokens"] / seconds,
        "seconds": seconds,
    }
