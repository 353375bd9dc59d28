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
from dataclasses import dataclass, replace
from functools import partial

from components.algorithms.continual.spec import ReplaySpec
from components.trajectories.groups import by_scenario, have_spread, separate
from components.trajectories.parts import DEMONSTRATION_POLICIES
from components.trajectories.schema import Trajectory
from components.trajectories.streamed import Pick, PickedTrajectories, heads

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
) -> tuple[PickedTrajectories, dict[str, float]]:
    """Return the trajectories of this round with groups drawn from earlier rounds (`earlier`, the latest first), and
    counts of replayed and stale trajectories. Rounds in files stay there.

    version: version of the policy in training. compared: True if the algorithm learns only from groups whose rewards
    differ, so that only these are drawn and counted in the share.
    """
    rounds = [_facts(round_, ago) for ago, round_ in enumerate((fresh, *earlier))]
    sampling_policies = [
        fact.policy for round_ in rounds for fact in round_ if fact.policy not in DEMONSTRATION_POLICIES
    ]
    versions = list(dict.fromkeys([version, *sampling_policies]))
    stale: list[_Facts] = []
    if spec.max_staleness is not None:
        recent = {*versions[: spec.max_staleness + 1], *DEMONSTRATION_POLICIES}
        stale = [fact for round_ in rounds for fact in round_ if fact.policy not in recent]
        rounds = [[fact for fact in round_ if fact.policy in recent] for round_ in rounds]
    fresh_groups, *earlier_groups = (
        [group for group in by_scenario(round_).values() if not compared or _has_spread(group)] for round_ in rounds
    )
    candidates = [group for round_ in earlier_groups for group in round_]
    replay_count = min(round(len(fresh_groups) * spec.share / (1 - spec.share)), len(candidates))
    drawn = sorted(random.Random(f"{seed} {version}").sample(range(len(candidates)), replay_count))
    chosen = [fact for index in drawn for fact in candidates[index]]
    picks = [Pick(fresh, [fact.place for fact in rounds[0]])]
    for ago, round_ in enumerate(earlier, 1):
        picks.append(Pick(round_, [fact.place for fact in chosen if fact.ago == ago], partial(_renamed, ago=ago)))
    if stale:
        listed = ", ".join(fact.id for fact in stale[:MAX_LISTED])
        log.warning(
            "%d trajectories are from policies more than replay.max_staleness=%d versions older than the one in "
            "training and are left out: %s%s",
            *(len(stale), spec.max_staleness, listed, " and others" if len(stale) > MAX_LISTED else ""),
        )
    counts = {"replayed_groups": len(drawn), "replayed": len(chosen), "stale": len(stale)}
    return PickedTrajectories(picks), {name: float(count) for name, count in counts.items()}


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of an episode by which it is chosen."""

    ago: int
    """Rounds since it was collected."""
    place: int
    """Position in its round."""
    id: str
    group: str
    policy: str
    reward: float | None
    """Reward; None also for a failed episode."""


def _facts(trajectories: Sequence[Trajectory], ago: int) -> list[_Facts]:
    """Return the facts of the trajectories of a round, with unique names."""
    facts = []
    for place, trajectory in enumerate(heads(trajectories)):
        named = _renamed(trajectory, ago) if ago else trajectory
        reward = trajectory.reward if trajectory.failure is None else None
        facts.append(_Facts(ago, place, named.id, named.group, trajectory.policy, reward))
    return facts


def _renamed(trajectory: Trajectory, ago: int) -> Trajectory:
    """Return a trajectory of an earlier round with a unique id."""
    metrics = {**trajectory.metrics, ROUNDS_AGO: float(ago)}
    return replace(separate(trajectory, f"@-{ago}"), metrics=metrics)


def _has_spread(group: Sequence[_Facts]) -> bool:
    return have_spread(fact.reward for fact in group if fact.reward is not None)
