"""Policy versions of an episode that several policies played: a partial rollout that was paused and continued
(`components.rollout.players.partial`).

`Trajectory.policy` is the first of them, so the age of an episode is that of its oldest tokens. The sampling parameters
state all: `versions`, a list of `[policy, tokens]` in the order of sampling. Each token has its version, also within a
message whose sampling was interrupted, and the log-probability under that version, which is what a correction by token
needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from components.trajectories.schema import Trajectory

VERSIONS = "versions"
"""Name among the sampling parameters."""
PAUSED = "paused"
"""Metric of an episode that is paused: the number of rounds that have paused it. Also the finish reason of a message
whose sampling was interrupted."""
POLICIES = "policies"
"""Metric of an episode: the number of policy versions that played it."""
NOT_SAMPLED = ""
"""Version of a token that no policy sampled."""


class PolicyTokens(NamedTuple):
    """A policy version, and the number of consecutive tokens that it sampled."""

    policy: str
    tokens: int


def versions_of(trajectory: Trajectory) -> list[PolicyTokens]:
    """Return the versions in the order of sampling."""
    recorded = trajectory.sampling.get(VERSIONS)
    if recorded is None:
        return [PolicyTokens(trajectory.policy, int(trajectory.metrics.get("sampled_tokens", 0.0)))]
    return [PolicyTokens(policy, tokens) for policy, tokens in recorded]


def with_versions(trajectory: Trajectory, versions: Sequence[PolicyTokens]) -> Trajectory:
    """Return the trajectory with its versions. Consecutive tokens of one policy are one version; a policy that sampled
    none is left out, unless no other sampled any."""
    merged: list[PolicyTokens] = []
    for policy, tokens in [version for version in versions if version.tokens] or versions[-1:]:
        if merged and merged[-1].policy == policy:
            merged[-1] = PolicyTokens(policy, merged[-1].tokens + tokens)
        else:
            merged.append(PolicyTokens(policy, tokens))
    sampling = {name: value for name, value in trajectory.sampling.items() if name != VERSIONS}
    if len(merged) > 1:
        sampling[VERSIONS] = [list(version) for version in merged]
    return replace(trajectory, policy=merged[0].policy, sampling=sampling)


def token_policies(trajectory: Trajectory) -> list[list[str]]:
    """Return the version that sampled each token, by history; `NOT_SAMPLED` for the tokens of prompts."""
    by_token = iter([policy for policy, tokens in versions_of(trajectory) for _ in range(tokens)])
    policies = []
    for history in trajectory.histories:
        versions = [NOT_SAMPLED] * len(history.token_ids)
        for message in history.messages:
            if message.finish_reason is not None:
                start, end = message.span or (0, 0)
                versions[start:end] = [next(by_token, trajectory.policy) for _ in range(start, end)]
        policies.append(versions)
    return policies


def off_policy_tokens(trajectories: Iterable[Trajectory], version: str) -> float:
    """Return the share of sampled tokens that a policy other than `version` sampled; 0 without sampled tokens."""
    sampled = Counter(
        policy
        for trajectory in trajectories
        for history in token_policies(trajectory)
        for policy in history
        if policy != NOT_SAMPLED
    )
    return (total - sampled[version]) / total if (total := sampled.total()) else 0.0
