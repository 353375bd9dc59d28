"""The learning rate of a gradient step, as a share of the full one: a linear rise, then what the algorithm says."""

from __future__ import annotations

import math

from components.algorithms.spec import DecaySpec, OptimizerSpec


def risen(spec: OptimizerSpec, step: int) -> float:
    """Share at a step, counted from 1 over all rounds, while the rate rises; 1 after that."""
    return min(1.0, step / spec.warmup_steps) if spec.warmup_steps else 1.0


def share(spec: DecaySpec, step: int) -> float:
    """The same, and its fall after the warm-up: linear, or half a cosine (arXiv:1608.03983, eq. 5), to 0."""
    if spec.decay == "none":
        return risen(spec, step)
    past = min(1.0, max(0, step - 1 - spec.warmup_steps) / spec.decay_steps)
    return risen(spec, step) * (1 - past if spec.decay == "linear" else (1 + math.cos(math.pi * past)) / 2)
