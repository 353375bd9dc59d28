"""Step rewards by continuation: what a step changed in how often the policy succeeds (VinePPO, arXiv:2410.01679).

With V_t the share of successes of the policy when it plays on from before turn t (`collect.continuations`), and V_0
that of the group's own episodes,

    reward        = success
    step reward   = V_(t+1) - V_t           of turn t; at the end of the episode V is the success itself

These add up to the success less V_0. Under `algorithm.credit=turns` with discount 0, no baseline and no scale they are
the advantages themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from components.specs.registered import registered
from components.trajectories import step_labels
from components.trajectories.schema import Score, Trajectory


@registered("reward.continued")
class Continued:
    """An episode that was not continued, as those of evaluations are not, is scored by its success alone."""

    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Scores the episodes of a scenario."""
        start = sum(one.success for one in group) / max(len(group), 1)
        return [_score(one, start) for one in group]


def _score(one: Trajectory, start: float) -> Score:
    success = float(one.success)
    labels = step_labels.read(step_labels.CONTINUED, one)
    steps = [after - before for before, after in pairwise([start, *labels])]
    return Score(one.id, success, {"success": success}, steps)
