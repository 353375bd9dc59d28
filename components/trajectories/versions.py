"""Policy versions of an episode that several policies played: a partial rollout that was paused and continued
(`components.rollout.players.partial`).

`Trajectory.policy` is the first of them, so the age of an episode is that of its oldest tokens. The sampling parameters
state all: `versions`, a list of `[policy, turns]` in the order of play. Each token has the version of its turn, and the
log-probability under that version, which is what a correction by token needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from components.trajectories.schema import Trajectory

VERSIONS = "versions"
"""Name among the sampling parameters."""
PAUSED = "paused"
"""Metric of an episode that is paused: 1."""
POLICIES = "policies"
"""Metric of an episode: the number of policy versions that played it."""
NOT_SAMPLED = ""
"""Version of a token that no policy sampled."""


class PolicyTurns(NamedTuple):
    """A policy version, and the number of consecutive turns that it played."""

    policy: str
    turns: int


def versions_of(trajectory: Trajectory) -> list[PolicyTurns]:
    """Return the versions in the order of play."""
    recorded = trajectory.sampling.get(VERSIONS)
    if recorded is None:
        return [PolicyTurns(trajectory.policy, int(trajectory.metrics.get("turns", 0.0)))]
    return [PolicyTurns(policy, turns) for policy, turns in recorded]


def with_versions(trajectory: Trajectory, versions: Sequence[PolicyTurns]) -> Trajectory:
    """Return the trajectory with its versions. Consecutive turns of one policy are one version."""
    merged: list[PolicyTurns] = []
    for policy, turns in versions:
        if merged and merged[-1].policy == policy:
            merged[-1] = PolicyTurns(policy, merged[-1].turns + turns)
        elif turns or not merged:
            merged.append(PolicyTurns(policy, turns))
    sampling = {name: value for name, value in trajectory.sampling.items() if name != VERSIONS}
    if len(merged) > 1:
        sampling[VERSIONS] = [list(version) for version in merged]
    return replace(trajectory, policy=merged[0].policy, sampling=sampling)


def token_policies(trajectory: Trajectory) -> list[list[str]]:
    """Return the version that sampled each token, by history; `NOT_SAMPLED` for the tokens of prompts."""
    by_turn = iter([policy for policy, turns in versions_of(trajectory) for _ in range(turns)])
    policies = []
    for history in trajectory.histories:
        versions = [NOT_SAMPLED] * len(history.token_ids)
        for message in history.messages:
            if message.finish_reason is not None:
                policy = next(by_turn, trajectory.policy)
                start, end = message.span or (0, 0)
                versions[start:end] = [policy] * (end - start)
        policies.append(versions)
    return policies


def off_policy_tokens(trajectories: Iterable[Trajectory], version: str) -> float:
    """Return the share of sampled tokens that a policy other than `version` sampled; 0 without sampled tokens."""
    sampled = [
        policy
        for trajectory in trajectories
        for history in token_policies(trajectory)
        for policy in history
        if policy != NOT_SAMPLED
    ]
    return sum(policy != version for policy in sampled) / len(sampled) if sampled else 0.0
