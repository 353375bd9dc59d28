"""Step labels of an episode, stored as metrics `NAME/0`, `NAME/1` and so on."""

from __future__ import annotations

from collections.abc import Sequence

from components.trajectories.schema import Trajectory

CONTINUED = "continued"
"""Name of the labels with the success rate of continuations from each turn (`collect.continuations`)."""
CONTINUATIONS, CONTINUED_TOKENS = "continuations", "continued_tokens"
"""Metrics of a labelled episode: number of continuations, and their sampled tokens."""


def written(name: str, labels: Sequence[float]) -> dict[str, float]:
    """Return the labels as metrics."""
    return {f"{name}/{turn}": label for turn, label in enumerate(labels)}


def read(name: str, trajectory: Trajectory) -> list[float]:
    """Return the labels of an episode in order; empty if it has none."""
    labels: list[float] = []
    while (label := trajectory.metrics.get(f"{name}/{len(labels)}")) is not None:
        labels.append(label)
    return labels
