"""The two runs of a bisection with their last evaluations, their difference, and the seeds that would decide it.

Differences in a metric are paired over held-out scenarios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, stdev
from typing import Any

from components.errors import ResourceError
from components.evaluation.metrics import mean_by_scenario, paired_difference, paired_means, paired_rewards
from components.evaluation.verdict import CONFIDENCE, POWER, Outcome, outcome, paired_scenarios
from components.trajectories.schema import Trajectory
from flows.history.records import Records, RunRecord, StageRecord
from flows.history.store_reader import StoreReader
from flows.history.trust import recorded_reader
from flows.reporting.comparison import compared_run

Pairing = Callable[[Sequence[Trajectory], Sequence[Trajectory]], Mapping[str, Any]]


def _turns(trajectory: Trajectory) -> float | None:
    return trajectory.metrics.get("turns")


def _reward(trajectory: Trajectory) -> float | None:
    return trajectory.reward


METRICS: dict[str, Pairing] = {
    "success": paired_difference,
    "reward": paired_rewards,
    "turns": lambda before, after: paired_means(before, after, _turns),
}
"""Paired differences by metric."""


@dataclass(frozen=True)
class PairedEffect:
    """Difference in the mean of a metric with its 95 % interval over scenarios."""

    difference: float
    low: float | None
    high: float | None
    before: float
    after: float
    scenarios: int

    @property
    def outcome(self) -> Outcome:
        """Verdict of the interval."""
        return outcome(self.low, self.high)

    @property
    def interval(self) -> list[float] | None:
        """Ends of the interval as JSON data."""
        return None if self.low is None or self.high is None else [self.low, self.high]

    def text(self) -> str:
        """Return the effect as text: `-0.412 [-0.463, -0.357]`."""
        interval = "" if self.low is None or self.high is None else f" [{self.low:+.3f}, {self.high:+.3f}]"
        return f"{self.difference:+.3f}{interval}"


def paired_effect(metric: str, before: Sequence[Trajectory], after: Sequence[Trajectory]) -> PairedEffect:
    """Return the effect on the scenarios that both evaluations finished, with the same content. Raises ResourceError if
    there is none."""
    first, second = same_scenarios(before, after)
    try:
        paired = METRICS[metric](first, second)
    except ValueError:
        raise ResourceError(
            f"the two evaluations share no scenario with a {metric}: they need the same environment, "
            "evaluate.split and evaluate.scenarios"
        ) from None
    return PairedEffect(
        paired["difference"], paired["low"], paired["high"], paired["before"], paired["after"], paired["n"]
    )


def same_scenarios(
    before: Sequence[Trajectory], after: Sequence[Trajectory]
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return the episodes of both sides on scenarios with the same id and content."""
    first, second = ({episode.group: episode.scenario for episode in side} for side in (before, after))
    same = {name for name in first.keys() & second.keys() if first[name] == second[name]}
    return [episode for episode in before if episode.group in same], [
        episode for episode in after if episode.group in same
    ]


def seeds_to_decide(
    metric: str, effect: PairedEffect, before: Sequence[Trajectory], after: Sequence[Trajectory]
) -> int | None:
    """Return the number of seeds of each run with which a difference of this size is decided at 80 % power, on the same
    scenarios; None without a difference.

    The variance between seeds is unknown with one seed of each. The number assumes that a further seed is as
    informative as the same number of further scenarios, so it is a lower bound.
    """
    if not effect.difference:
        return None
    first, second = same_scenarios(before, after)
    if metric == "success":
        paired = paired_difference(first, second)
        changed = (len(paired["improved"]) + len(paired["regressed"])) / paired["n"]
        needed = paired_scenarios(effect.difference, changed)
    else:
        measure = _turns if metric == "turns" else _reward
        means = [mean_by_scenario(side, measure) for side in (first, second)]
        differences = [means[1][name] - means[0][name] for name in means[0].keys() & means[1].keys()]
        if len(differences) < 2:
            return None
        z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) + NormalDist().inv_cdf(POWER)
        needed = math.ceil((z * stdev(differences) / effect.difference) ** 2)
    return max(2, math.ceil(needed / effect.scenarios))


@dataclass(frozen=True)
class EvaluatedRun:
    """Finished run with the episodes of its last evaluation."""

    record: RunRecord
    reader: StoreReader
    episodes: Sequence[Trajectory]


@dataclass(frozen=True)
class Ends:
    """Good and bad run, and their difference in a metric."""

    good: EvaluatedRun
    bad: EvaluatedRun
    metric: str
    effect: PairedEffect
    """Effect of the bad run against the good one."""

    @property
    def common(self) -> list[tuple[StageRecord, StageRecord]]:
        """Stages with the same label in both runs, in the order of the good run."""
        by_label = {stage.label: stage for stage in self.bad.record.stages}
        return [(stage, by_label[stage.label]) for stage in self.good.record.stages if stage.label in by_label]

    @property
    def shared(self) -> list[str]:
        """Labels of the stages whose artifact both runs share, in their order."""
        return [
            first.label for first, second in self.common if (first.key, first.digest) == (second.key, second.digest)
        ]


def evaluated(record: RunRecord, root: Path, trust: bool = False) -> EvaluatedRun:
    """Return a run with its last evaluation. Raises ResourceError if it did not finish, or has no evaluation that can
    be read, or whose evaluation may stop early."""
    records = Records(root)
    status = records.status(record)
    if status != "finished":
        raise ResourceError(
            f"run {record.short} ({record.name}) is {status}; expected a finished run. Its command resumes it: "
            "repeat it, then bisect"
        )
    reader = recorded_reader(records.root, record, trust)
    run = compared_run("run", record, records, reader)
    if run.last is None:
        raise ResourceError(f"run {record.short} ({record.name}) has no evaluation to compare: {'; '.join(run.notes)}")
    if "sequence" in run.last.summary:
        raise ResourceError(
            f"run {record.short} ({record.name}) has evaluate.stop=decided, so its last evaluation has no fixed number "
            "of scenarios, which the search for a cause needs; run its command with evaluate.stop=never (only the "
            "evaluations are repeated), and use that run"
        )
    return EvaluatedRun(record, reader, run.last.trajectories)


def read_ends(root: Path, good: str, bad: str, metric: str, trust: bool = False) -> Ends:
    """Return the two runs. Raises ResourceError for an unknown or unfinished run, the same run twice, runs without a
    common scenario, and runs that do not differ beyond noise."""
    records = Records(root)
    first, second = records.get(good), records.get(bad)
    if first.id == second.id:
        raise ResourceError(f"GOOD = {good} and BAD = {bad} are the same run, {first.short}; expected two runs")
    ends = [evaluated(first, root, trust), evaluated(second, root, trust)]
    try:
        effect = paired_effect(metric, ends[0].episodes, ends[1].episodes)
    except ResourceError as error:
        raise ResourceError(f"runs {first.short} and {second.short} cannot be compared: {error}") from None
    result = Ends(ends[0], ends[1], metric, effect)
    if effect.outcome == "undecided":
        raise ResourceError(_undecided(result))
    return result


def _undecided(ends: Ends) -> str:
    """Return the message on runs that do not differ beyond noise, with the seeds that would decide it."""
    good, bad = ends.good.record, ends.bad.record
    text = (
        f"runs {good.short} and {bad.short} do not differ in {ends.metric} beyond noise: {ends.effect.text()} on "
        f"{ends.effect.scenarios} shared scenarios, so there is nothing to explain"
    )
    seeds = seeds_to_decide(ends.metric, ends.effect, ends.good.episodes, ends.bad.episodes)
    if seeds is None:
        return f"{text}. No number of seeds decides a difference of {ends.effect.difference:g}"
    return (
        f"{text}. At least {seeds} seeds of each would decide a difference of this size at 80 % power: run both with "
        f"'seeds=[{','.join(map(str, range(min(seeds, 5))))}{',…' if seeds > 5 else ''}]', then "
        "python -m flows.compare A=RUN,RUN B=RUN,RUN"
    )
