"""Groups: the trajectories of one scenario, which are compared with each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from components.errors import ArtifactError
from components.trajectories.schema import Scenario, Trajectory

ASIDE = "~"
"""Between the id of a scenario and the name of a group of its own, for episodes that began differently."""
RELATIVE_TOLERANCE = 1e-9
"""Two rewards that differ by less than this share of the larger one are equal: rounding, not judgement."""


def aside(scenario: Scenario, name: str) -> Scenario:
    """The scenario under another id, for episodes that are not to be compared with its others: second attempts, those
    of another player."""
    return replace(scenario, id=f"{scenario.id}{ASIDE}{name}")


def scenario_of(group: str) -> str:
    """Id of the scenario to which a group belongs: its own, or the one that it stands aside of."""
    return group.partition(ASIDE)[0]


def misnamed(scenarios: Iterable[Scenario]) -> str | None:
    """What is wrong with an id that looks like that of a group; None where none does."""
    marked = next((one.id for one in scenarios if ASIDE in one.id), None)
    if marked is None:
        return None
    return f"gives the scenario id {marked!r}; expected one without {ASIDE!r}, which stands before names of groups"


def by_scenario(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """Groups by scenario id, groups and members in the order in which they come."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return groups


def adjacent_groups(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """One group after the other, with one in memory at a time: the trajectories of a scenario lie next to each other,
    as collect writes them.

    Raises ArtifactError at a scenario that comes back: its trajectories would be compared in parts.
    """
    seen: set[str] = set()
    for name, members in groupby(trajectories, key=lambda trajectory: trajectory.group):
        group = list(members)
        if name in seen:
            raise ArtifactError(
                f"the trajectories of scenario {name} do not lie next to each other: {group[0].id} comes after those "
                "of another one, and each group is read as a whole. Sort them by scenario first, as with "
                "sorted(trajectories, key=lambda trajectory: trajectory.group)"
            )
        seen.add(name)
        yield group


def have_spread(rewards: Iterable[float], relative_tolerance: float = RELATIVE_TOLERANCE) -> bool:
    """Whether the rewards differ: max - min > tolerance · max(|max|, |min|), so the answer is the same for the same
    rewards in another unit. False for fewer than two."""
    values = list(rewards)
    return len(values) > 1 and not math.isclose(min(values), max(values), rel_tol=relative_tolerance)
