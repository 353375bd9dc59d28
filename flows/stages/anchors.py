"""Anchors of a judge stage: a fixed sample of episodes that each round judges again, to measure the judge's drift.

The number of the judgement and the episodes of its round are part of the stage key. So the anchors are judged again
exactly when the episodes of the round are judged, and are cached when these are. The cache of the judge's answers is
not used: it would answer with the first judgement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from components.artifacts import Artifact
from components.specs import Spec

if TYPE_CHECKING:
    from components.trajectories.schema import Trajectory

FIRST, CONTROL = "first", "control"
"""Input names of the scores that a judgement is compared with."""
ROUND = "round"
"""Input name of the episodes that the round judges."""
PREFIX = "drift/"
"""Prefix of the drift among the metrics of a judge stage."""


class AnchorSpec(Spec):
    groups: int = Field(ge=1)
    """Number of scenarios whose episodes are the anchors."""
    number: int = Field(ge=0)
    """Number of the judgement: the round, or the one before the first round for the first judgement."""


def anchor_label(number: int) -> str:
    """Return the label of the stage that judges the anchors for the given time."""
    return f"judge[anchors-{number}]"


def is_anchor_label(label: str) -> bool:
    """Return True for a label of `anchor_label`."""
    return label.startswith("judge[anchors-")


def sample_anchors(trajectories: Path, groups: int) -> list[Trajectory]:
    """Return the finished episodes of a fixed sample of scenarios, in their order. Scenarios with at least two finished
    episodes come first, then those with one; among these a digest of the scenario's id decides."""
    from components.trajectories.store import read_trajectories

    finished: dict[str, int] = {}
    for trajectory in read_trajectories(trajectories):
        if trajectory.failure is None:
            finished[trajectory.group] = finished.get(trajectory.group, 0) + 1
    order = sorted(finished, key=lambda name: (finished[name] < 2, hashlib.sha256(name.encode()).digest()))
    chosen = set(order[:groups])
    return [
        trajectory
        for trajectory in read_trajectories(trajectories)
        if trajectory.group in chosen and trajectory.failure is None
    ]


def drift_of(anchors: Sequence[Trajectory], scores: Path, inputs: Mapping[str, Artifact]) -> dict[str, float]:
    """Return the drift of a judgement against the first one and its control, which are inputs; empty for these two."""
    from components.evaluation.judge_drift import compare_judgements
    from components.trajectories.groups import by_scenario
    from components.trajectories.store import read_scores

    def read(path: Path) -> dict[str, float | None]:
        return {score.trajectory_id: score.reward for score in read_scores(path)}

    if CONTROL not in inputs:
        return {}
    groups = [[trajectory.id for trajectory in group] for group in by_scenario(anchors).values()]
    first, control = (read(inputs[name].path / "scores.parquet") for name in (FIRST, CONTROL))
    drift = compare_judgements(groups, first=first, control=control, later=read(scores))
    return {f"{PREFIX}{name}": value for name, value in drift.items()}


def drift_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the drift among the metrics of a judge stage, without the prefix; empty if it has none."""
    return {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}
