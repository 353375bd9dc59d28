"""The learning rate of a gradient step, as a share of the full one: a linear rise over the first steps, times a fall
that ends with the last round."""

from __future__ import annotations

import math
from dataclasses import dataclass

from components.algorithms.spec import DecaySpec, OptimizerSpec


@dataclass(frozen=True)
class Rounds:
    """The place of a training among the rounds of a run: round `number` of `total`, both counted from 1."""

    number: int
    total: int


ONLY_ROUND = Rounds(1, 1)


def warmup_share(spec: OptimizerSpec, step: int) -> float:
    """Return the share at a step, counted from 1 over all rounds, while the rate rises; 1 after that."""
    return min(1.0, step / spec.warmup_steps) if spec.warmup_steps else 1.0


def share(spec: DecaySpec, step: int, rounds: Rounds, done: float) -> float:
    """Return the share at a step: the rise, times a fall from 1 at the start of the first round to 0 at the end of the
    last, linear or half a cosine (arXiv:1608.03983, eq. 5).

    done: share, in [0, 1), of this round's gradient steps that come before the step. A round counts the same however
    many steps it takes, so a round with little to learn from does not slow the fall down.
    """
    if spec.decay == "none":
        return warmup_share(spec, step)
    past = (rounds.number - 1 + done) / rounds.total
    return warmup_share(spec, step) * (1 - past if spec.decay == "linear" else (1 + math.cos(math.pi * past)) / 2)
