"""Replay: groups of earlier rounds in the training of a later one, against forgetting and for sample efficiency.

Groups stay complete and keep the log-probabilities with which they were sampled: a policy gradient corrects for the
changed policy by its ratio. If an algorithm compares the episodes of a group, only groups with spread are drawn. The id
of a replayed trajectory contains its round (`s3@-2/0`: scenario s3, two rounds ago), because the same scenario may
occur in several rounds; `rounds_ago` is among its metrics.

Versions of the policy are counted back from the one in training, by the policies that sampled: a round that changed
nothing created no version. A trajectory more than `max_staleness` versions old is dropped, whether it is from an
earlier round or this one.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace

from components.algorithms.continual.spec import ReplaySpec
from components.trajectories.groups import by_scenario, have_spread, separate
from components.trajectories.parts import DEMONSTRATION_POLICIES
from components.trajectories.schema import Trajectory

log = logging.getLogger(__name__)

ROUNDS_AGO = "rounds_ago"
"""Metric of a replayed trajectory: the number of rounds since it was collected."""
MAX_LISTED = 5
"""Largest number of stale trajectories that the log lists."""


def mixed(
    spec: ReplaySpec,
    fresh: Sequence[Trajectory],
    earlier: Sequence[Sequence[Trajectory]],
    *,
    version: str,
    compared: bool,
    seed: int,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Return the trajectories of this round with groups drawn from earlier rounds (`earlier`, the latest first), and
    counts of replayed and stale trajectories.

    version: version of the policy in training. compared: True if the algorithm learns only from groups whose rewards
    differ, so that only these are drawn and counted in the share.
    """
    sampling_policies = [
        trajectory.policy
        for round_ in (fresh, *earlier)
        for trajectory in round_
        if trajectory.policy not in DEMONSTRATION_POLICIES
    ]
    versions = list(dict.fromkeys([version, *sampling_policies]))
    rounds = [list(fresh), *(_renamed(round_, ago) for ago, round_ in enumerate(earlier, 1))]
    stale: list[Trajectory] = []
    if spec.max_staleness is not None:
        recent = {*versions[: spec.max_staleness + 1], *DEMONSTRATION_POLICIES}
        stale = [trajectory for round_ in rounds for trajectory in round_ if trajectory.policy not in recent]
        rounds = [[trajectory for trajectory in round_ if trajectory.policy in recent] for round_ in rounds]
    fresh_groups, *earlier_groups = (
        [group for group in by_scenario(round_).values() if not compared or _has_spread(group)] for round_ in rounds
    )
    candidates = [group for round_ in earlier_groups for group in round_]
    replay_count = min(round(len(fresh_groups) * spec.share / (1 - spec.share)), len(candidates))
    drawn = sorted(random.Random(f"{seed} {version}").sample(range(len(candidates)), replay_count))
    replayed = [trajectory for index in drawn for trajectory in candidates[index]]
    if stale:
        listed = ", ".join(trajectory.id for trajectory in stale[:MAX_LISTED])
        log.warning(
            "%d trajectories are from policies more than replay.max_staleness=%d versions older than the one in "
            "training and are left out: %s%s",
            *(len(stale), spec.max_staleness, listed, " and others" if len(stale) > MAX_LISTED else ""),
        )
    counts = {"replayed_groups": len(drawn), "replayed": len(replayed), "stale": len(stale)}
    return rounds[0] + replayed, {name: float(count) for name, count in counts.items()}


def _renamed(trajectories: Sequence[Trajectory], ago: int) -> list[Trajectory]:
    """Return the trajectories of an earlier round with unique ids."""
    renamed = []
    for trajectory in trajectories:
        metrics = {**trajectory.metrics, ROUNDS_AGO: float(ago)}
        renamed.append(replace(separate(trajectory, f"@-{ago}"), metrics=metrics))
    return renamed


def _has_spread(group: Sequence[Trajectory]) -> bool:
    return have_spread(
        trajectory.reward for trajectory in group if trajectory.reward is not None and trajectory.failure is None
    )
