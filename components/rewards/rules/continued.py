"""Step rewards from continuations: the change in the policy's success rate at each step (VinePPO, arXiv:2410.01679).

With V_t the success rate of the policy when it continues from before turn t (`collect.continuations`), and V_0 that of
the group's own episodes,

    reward        = success
    step reward   = V_(t+1) - V_t           of turn t; at the end of the episode V is the success itself

The step rewards add up to the success minus V_0. Under `algorithm.credit=turns` with discount 0, no baseline and no
scale they equal the advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from components.specs.registered import registered
from components.trajectories import step_labels
from components.trajectories.schema import Score, Trajectory


@registered("reward.continued")
class Continued:
    """Success, with step rewards from continuations. An episode that was not continued, as in evaluations, is scored by
    its success alone."""

    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return the scores of the episodes of a scenario."""
        start = sum(trajectory.success for trajectory in group) / max(len(group), 1)
        return [_score(trajectory, start) for trajectory in group]


def _score(trajectory: Trajectory, start: float) -> Score:
    success = float(trajectory.success)
    labels = step_labels.read(step_labels.CONTINUED, trajectory)
    steps = [after - before for before, after in pairwise([start, *labels])]
    return Score(trajectory.id, success, {"success": success}, steps)
