"""Learning rate schedule of a gradient step, as a factor of the full rate: a linear warm-up over the first steps, times
a decay that ends with the last round."""

from __future__ import annotations

import math

from components.algorithms.spec import DecaySpec, OptimizerSpec
from components.algorithms.trainer import Rounds


def warmup_share(spec: OptimizerSpec, step: int) -> float:
    """Return the warm-up factor at a step, counted from 1 over all rounds; 1 after the warm-up."""
    return min(1.0, step / spec.warmup_steps) if spec.warmup_steps else 1.0


def share(spec: DecaySpec, step: int, rounds: Rounds, done: float) -> float:
    """Return the factor at a step: the warm-up, times a decay from 1 at the start of the first round to 0 at the end of
    the last, linear or half a cosine (arXiv:1608.03983, eq. 5).

    done: fraction, in [0, 1), of this round's gradient steps before the step. All rounds have the same share of the
    decay, however many steps they take, so a round with few groups does not slow it down.
    """
    if spec.decay == "none":
        return warmup_share(spec, step)
    progress = (rounds.number - 1 + done) / rounds.total
    return warmup_share(spec, step) * (
        1 - progress if spec.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    )
