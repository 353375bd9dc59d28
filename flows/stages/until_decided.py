"""Evaluation in batches, until the paired difference to a reference evaluation is decided.

The scenarios are played in an order that depends on their ids alone, not in the environment's, which may be sorted by
difficulty. Every evaluation has the same order, so two that stop share the scenarios of the shorter one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from components.artifacts import Artifact
from components.evaluation.spec import EvaluateSpec
from components.trajectories.schema import Scenario, Trajectory
from flows.stages.base import Context

Played = tuple[Sequence[Trajectory], dict[str, float], dict[str, float]]
"""Episodes, the seconds of each by id, and throughput metrics."""
PlayBatch = Callable[[Sequence[Scenario], EvaluateSpec, Context], Played]


@dataclass
class BatchedEpisodes:
    """Episodes of the batches so far."""

    trajectories: list[Trajectory] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    speeds: list[dict[str, float]] = field(default_factory=list)

    def add(self, played: Played) -> None:
        """Add a batch."""
        self.trajectories += played[0]
        self.times |= played[1]
        self.speeds.append(played[2])

    def speed(self) -> dict[str, float]:
        """Return the throughput metrics of all batches. Episodes of earlier batches are no resumed ones."""
        seconds = sum(speed["seconds"] for speed in self.speeds)
        tokens = sum(speed["tokens_per_s"] * speed["seconds"] for speed in self.speeds)
        retried = sum(speed["retried"] for speed in self.speeds)
        rate = tokens / seconds if seconds else 0.0
        return {"seconds": seconds, "tokens_per_s": rate, "resumed": self.speeds[0]["resumed"], "retried": retried}


def play_until_decided(
    scenarios: Sequence[Scenario],
    spec: EvaluateSpec,
    reference: Artifact,
    play: PlayBatch,
    context: Context,
    samples: int,
) -> tuple[Played, dict[str, Any]]:
    """Play batches of scenarios until the difference in success to the reference is decided, or all are played. Return
    the episodes in the order of `scenarios`, and the data of the confidence sequence for the summary.

    samples: episodes per scenario. Raises TooManyFailures."""
    from components.evaluation.metrics import paired_difference
    from components.rollout.collector import failures_allowed
    from components.trajectories.sources import ScoredFiles

    before = ScoredFiles.of(reference.path).load()
    order = sorted(scenarios, key=lambda scenario: hashlib.sha256(scenario.id.encode()).digest())
    total = len(order) * samples
    allowed = failures_allowed(spec.max_failures, total)
    episodes = BatchedEpisodes()
    paired: Mapping[str, Any] = {}
    for start in range(0, len(order), spec.batch):
        failed = sum(trajectory.failure is not None for trajectory in episodes.trajectories)
        limits = spec.model_copy(update={"max_failures": float(allowed - failed)})
        batch = order[start : start + spec.batch]
        episodes.add(play(batch, limits, _shifted(context, start * samples, total)))
        try:
            paired = paired_difference(before, episodes.trajectories, spec.alpha)
        except ValueError:  # no pair of finished episodes yet
            continue
        if paired["low"] > 0 or paired["high"] < 0:
            break
    place = {scenario.id: index for index, scenario in enumerate(scenarios)}
    trajectories = sorted(episodes.trajectories, key=lambda trajectory: place[trajectory.group])
    ends = {name: paired.get(name) for name in ("difference", "low", "high", "n")}
    decided = bool(paired) and (paired["low"] > 0 or paired["high"] < 0)
    played = len({trajectory.group for trajectory in trajectories})
    sequence = {"alpha": spec.alpha, "scenarios": played, "planned": len(order), "decided": decided, **ends}
    return (trajectories, episodes.times, episodes.speed()), sequence


def _shifted(context: Context, done_before: int, planned: int) -> Context:
    """Return the context of a batch, whose progress is that of the whole evaluation."""

    def progress(done: int, total: int, values: Mapping[str, float] | None = None) -> None:
        context.progress(done_before + done, planned, values)

    return replace(context, progress=progress)
