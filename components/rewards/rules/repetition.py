"""Repetition penalty: 1 - distinct-n (arXiv:1510.03055) of the sampled tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.rewards.rules.answers import sampled_tokens
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory


@registered("reward.repetition")
class Repetition:
    """Penalty: -cost · share of the n-grams of sampled tokens that repeat an earlier one of the same message.

    Args:
        cost: Penalty for a share of 1; 0 or more.
        ngram: Tokens of one n-gram.

    The component `share` is that share. A demonstration was not sampled and has 0; an episode without a token count is
    unscored.
    """

    def __init__(self, cost: Annotated[float, Field(ge=0)] = 1.0, ngram: Annotated[int, Field(ge=1)] = 3):
        self.cost, self.ngram = cost, ngram

    def __call__(self, trajectory: Trajectory) -> Score:
        sampled_tokens(trajectory)
        share = repetition(trajectory, self.ngram)
        return Score(trajectory.id, -self.cost * share, {"share": share})


def repetition(trajectory: Trajectory, size: int) -> float:
    """Return the share of repeated n-grams over the sampled messages of an episode; 0 if no message is long enough for
    one."""
    total = distinct = 0
    for history in trajectory.histories:
        for message in history.messages:
            if message.span is not None:
                tokens = history.token_ids[slice(*message.span)]
                grams = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
                total, distinct = total + len(grams), distinct + len(set(grams))
    return 1.0 - distinct / total if total else 0.0
