"""Replay: groups of earlier rounds in the training of a later one, against forgetting and for the sake of samples.

Groups stay whole, and keep the log-probabilities with which they were sampled: a policy gradient corrects for the
policy that has moved since by its ratio. Where an algorithm compares the episodes of a group, only groups with
something to compare are drawn. A replayed trajectory is named after its round (`s3@-2/0`: scenario s3, two rounds
ago), for the same scenario may be in several rounds; `rounds_ago` is among its metrics.

Versions of the policy are counted back from the one in training, by those that played: a round that changed nothing
made no version. A trajectory more than `max_staleness` versions old is dropped, of earlier rounds and of this one.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace

from components.algorithms.spec import ReplaySpec
from components.trajectories.groups import by_scenario, have_spread
from components.trajectories.parts import SHOWN
from components.trajectories.schema import Trajectory

log = logging.getLogger(__name__)

ROUNDS_AGO = "rounds_ago"
"""Metric of a replayed trajectory."""
MOST_NAMED = 5
"""Stale trajectories that are named in the log."""


def mixed(
    spec: ReplaySpec,
    fresh: Sequence[Trajectory],
    earlier: Sequence[Sequence[Trajectory]],
    *,
    version: str,
    compared: bool,
    seed: int,
) -> tuple[list[Trajectory], dict[str, float]]:
    """The trajectories of this round with groups drawn from those of earlier rounds, the nearest first, and counts of
    what was done. version: of the policy in training. compared: only groups whose rewards differ are learned from, so
    that only these are drawn and counted in the share."""
    played = [one.policy for part in (fresh, *earlier) for one in part if one.policy not in SHOWN]
    versions = list(dict.fromkeys([version, *played]))
    rounds = [list(fresh), *(_named(part, ago) for ago, part in enumerate(earlier, 1))]
    stale: list[Trajectory] = []
    if spec.max_staleness is not None:
        young = {*versions[: spec.max_staleness + 1], *SHOWN}
        stale = [one for part in rounds for one in part if one.policy not in young]
        rounds = [[one for one in part if one.policy in young] for part in rounds]
    own, *others = (
        [group for group in by_scenario(part).values() if not compared or _spread(group)] for part in rounds
    )
    candidates = [group for part in others for group in part]
    wanted = min(round(len(own) * spec.share / (1 - spec.share)), len(candidates))
    drawn = sorted(random.Random(f"{seed} {version}").sample(range(len(candidates)), wanted))
    replayed = [one for index in drawn for one in candidates[index]]
    if stale:
        named = ", ".join(one.id for one in stale[:MOST_NAMED])
        log.warning(
            "%d trajectories are from policies more than replay.max_staleness=%d versions older than the one in "
            "training and are left out: %s%s",
            *(len(stale), spec.max_staleness, named, " and others" if len(stale) > MOST_NAMED else ""),
        )
    counts = {"replayed_groups": len(drawn), "replayed": len(replayed), "stale": len(stale)}
    return rounds[0] + replayed, {name: float(count) for name, count in counts.items()}


def _named(trajectories: Sequence[Trajectory], ago: int) -> list[Trajectory]:
    """The same under names of their own."""
    found = []
    for one in trajectories:
        scenario = replace(one.scenario, id=f"{one.scenario.id}@-{ago}")
        metrics = {**one.metrics, ROUNDS_AGO: float(ago)}
        found.append(replace(one, id=f"{scenario.id}/{one.sample}", scenario=scenario, metrics=metrics))
    return found


def _spread(group: Sequence[Trajectory]) -> bool:
    return have_spread(one.reward for one in group if one.reward is not None and one.failure is None)
