"""Groups: the trajectories of one scenario, which are compared with each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Literal, Protocol, TypeVar

from components.errors import ArtifactError
from components.trajectories.schema import Scenario, Trajectory

ASIDE = "~"
"""Separator between a scenario id and the name of a separate group of episodes that began differently."""
BEGUN = "@round-"
"""Separator between a scenario id and the round in which its group began."""
PairSelection = Literal["best_worst", "all"]
"""Pairs of a scenario: the best with the worst episode, or every two with different values."""
RELATIVE_TOLERANCE = 1e-9
"""Relative difference up to which two rewards are equal, because of rounding."""


def aside(scenario: Scenario, name: str) -> Scenario:
    """Return the scenario with the id of a separate group, for episodes that are not comparable with its others: second
    attempts, or another player's."""
    return replace(scenario, id=f"{scenario.id}{ASIDE}{name}")


def separate(trajectory: Trajectory, suffix: str) -> Trajectory:
    """Return the trajectory in a group of its own collection: its scenario id with a suffix such as `@-2`. Trajectories
    of two collections of one scenario are not compared, and their ids are unique."""
    scenario = replace(trajectory.scenario, id=f"{trajectory.scenario.id}{suffix}")
    return replace(trajectory, id=f"{scenario.id}/{trajectory.sample}", scenario=scenario)


def begun(trajectory: Trajectory, round_: int) -> Trajectory:
    """Return the trajectory in the group of its scenario that began in a round; one that is named already is unchanged.
    Its group is complete in a later round, which may draw the same scenario."""
    return trajectory if BEGUN in trajectory.group else separate(trajectory, f"{BEGUN}{round_}")


def begun_scenario(scenario: Scenario) -> Scenario:
    """Return the scenario of `begun`, with its own id."""
    return replace(scenario, id=scenario.id.rpartition(BEGUN)[0])


def scenario_of(group: str) -> str:
    """Return the scenario id of a group, without the name of a separate group."""
    return group.partition(ASIDE)[0]


def misnamed(scenarios: Iterable[Scenario]) -> str | None:
    """Return the problem of the first scenario id with the group separator; None without one."""
    invalid = next((scenario.id for scenario in scenarios if ASIDE in scenario.id), None)
    if invalid is None:
        return None
    return f"gives the scenario id {invalid!r}; expected one without {ASIDE!r}, which separates the names of groups"


class Grouped(Protocol):
    """Episode of a group."""

    @property
    def group(self) -> str: ...


Episode = TypeVar("Episode", bound=Grouped)


def by_scenario(trajectories: Iterable[Episode]) -> dict[str, list[Episode]]:
    """Return trajectories by scenario id; groups and members keep the order of the input."""
    groups: dict[str, list[Episode]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return groups


def adjacent_groups(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """Yield each group, with one in memory at a time. The trajectories of a scenario must be adjacent, as collect
    writes them.

    Raises ArtifactError if a scenario occurs again later: its group would be split.
    """
    finished: set[str] = set()
    for name, members in groupby(trajectories, key=lambda trajectory: trajectory.group):
        group = list(members)
        if name in finished:
            raise not_adjacent(name, group[0].id)
        finished.add(name)
        yield group


def not_adjacent(group: str, trajectory_id: str) -> ArtifactError:
    """Return the error for a group whose trajectories are not adjacent. trajectory_id: first one that comes later."""
    return ArtifactError(
        f"the trajectories of scenario {group} do not lie next to each other: {trajectory_id} comes after those of "
        "another scenario, and each group is read as a whole. Sort them by scenario first, as with "
        "sorted(trajectories, key=lambda trajectory: trajectory.group)"
    )


def have_spread(rewards: Iterable[float], relative_tolerance: float = RELATIVE_TOLERANCE) -> bool:
    """Return True if the rewards differ: max - min > tolerance · max(|max|, |min|), which is invariant to scaling.
    False for fewer than two rewards."""
    values = list(rewards)
    return len(values) > 1 and not math.isclose(min(values), max(values), rel_tol=relative_tolerance)


def pairs(
    trajectories: Iterable[Episode], value: Callable[[Episode], float], which: PairSelection, min_margin: float
) -> list[tuple[Episode, Episode]]:
    """Return the (better, worse) pairs of each scenario by `value`: the best with the worst episode, or every two
    episodes with different values. Pairs that differ by at most `min_margin`, or only by rounding, are left out."""
    result = []
    for group in by_scenario(trajectories).values():
        ranked = sorted(group, key=lambda trajectory: -value(trajectory))  # stable: among equals, the first comes first
        candidates = [(ranked[0], min(group, key=value))]
        if which == "all":
            candidates = [(better, worse) for index, better in enumerate(ranked) for worse in ranked[index + 1 :]]
        for better, worse in candidates:
            values = value(better), value(worse)
            if have_spread(values) and values[0] - values[1] > min_margin:
                result.append((better, worse))
    return result
