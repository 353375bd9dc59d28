"""Parts of a collection: whose episodes they are. Figures of one part say nothing of another, so they are kept apart.

The policy's own attempts are the main part, without a name. Beside them there may be groups that stand aside of their
scenario (second attempts, those of another player), the episodes of a teacher, and demonstrations. Who plays alone,
such as a solver or a teacher before the rounds, is the main part.
"""

from __future__ import annotations

from collections.abc import Iterable

from components.trajectories.groups import ASIDE, scenario_of
from components.trajectories.schema import Trajectory

SOLVER, TEACHER, DEMONSTRATION, CORRECTION = SHOWN = ("solver", "teacher", "demonstration", "correction")
"""Who plays in place of a version of the policy (`Trajectory.policy`): the environment's solution, another model, a
second attempt written down without the reflection that led to it, and a person who corrected the last message, of which
alone is learned. What they show does not get stale."""


def part_of(trajectory: Trajectory) -> str:
    """Name of the part; empty for the policy's own attempts."""
    group = trajectory.group.removeprefix(scenario_of(trajectory.group)).removeprefix(ASIDE)
    return trajectory.policy if trajectory.policy in SHOWN else group


def main_of(parts: Iterable[str]) -> str:
    """Name of the main part among these: the policy's own attempts, or who played alone."""
    names = set(parts)
    return names.pop() if len(names) == 1 else ""
