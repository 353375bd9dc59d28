"""Labels of the turns of an episode, among its metrics: `NAME/0`, `NAME/1` and so on."""

from __future__ import annotations

from collections.abc import Sequence

from components.trajectories.schema import Trajectory

CONTINUED = "continued"
"""Of each turn, how often the policy succeeded when it played on from there (`collect.continuations`)."""
CONTINUATIONS, CONTINUED_TOKENS = "continuations", "continued_tokens"
"""Metrics of an episode with such labels: how often was played on from its turns, and what that sampled."""


def written(name: str, labels: Sequence[float]) -> dict[str, float]:
    """The labels as metrics."""
    return {f"{name}/{turn}": label for turn, label in enumerate(labels)}


def read(name: str, trajectory: Trajectory) -> list[float]:
    """The labels in order; none where there are none."""
    found: list[float] = []
    while (label := trajectory.metrics.get(f"{name}/{len(found)}")) is not None:
        found.append(label)
    return found
