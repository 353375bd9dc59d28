"""Parts of a collection, by the author of the episodes. Metrics of each part are reported separately.

The policy's own attempts are the main part, whose name is empty. Other parts are separate groups of a scenario (second
attempts, another player's episodes), a teacher's episodes, and demonstrations. If all episodes belong to one part, such
as a solver's or a teacher's before the rounds, that is the main part.
"""

from __future__ import annotations

from collections.abc import Iterable

from components.trajectories.groups import ASIDE, scenario_of
from components.trajectories.schema import Trajectory

SOLVER, TEACHER, DEMONSTRATION, CORRECTION, IMPORTED = DEMONSTRATION_POLICIES = (
    "solver",
    "teacher",
    "demonstration",
    "correction",
    "imported",
)
"""Values of `Trajectory.policy` for demonstrations: the environment's solution, another model, a second attempt without
its reflection, a person's correction of the last message, which alone is trained on, and data of the user's own. They
never become stale."""

RANDOM = "random"
"""Value of `Trajectory.policy` for episodes of random actions, which are never trained on."""


def part_of(trajectory: Trajectory) -> str:
    """Return the name of the part; empty for the policy's own attempts."""
    group = trajectory.group.removeprefix(scenario_of(trajectory.group)).removeprefix(ASIDE)
    return trajectory.policy if trajectory.policy in DEMONSTRATION_POLICIES else group


def main_of(parts: Iterable[str]) -> str:
    """Return the name of the main part: the only one of `parts`, else the policy's own attempts."""
    names = set(parts)
    return names.pop() if len(names) == 1 else ""
