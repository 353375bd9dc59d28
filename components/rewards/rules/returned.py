"""The reward that environment or agent gave: what the outcome calls `reward`, or else the sum of the step rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from components.specs.registered import registered
from components.trajectories.schema import Failure, Score, Trajectory


@registered("reward.returned")
class Returned:
    """An episode without either is unscored and says so."""

    def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Scores each trajectory for itself."""
        return [_score(one) for one in group]


def _score(one: Trajectory) -> Score:
    given: Any = one.outcome.get("reward", sum(one.step_rewards) if one.step_rewards else None)
    if isinstance(given, Real) and math.isfinite(float(given)):
        return Score(one.id, float(given), {"returned": float(given)}, list(one.step_rewards))
    why = f"neither outcome['reward'] nor step rewards: found {given!r:.100}"
    return Score(one.id, None, failure=Failure("judge", "JudgeError", why))
