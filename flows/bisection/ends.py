"""The two runs of a bisection: checked, with their last evaluations and the difference to explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.errors import ResourceError
from components.trajectories.schema import Trajectory
from flows.bisection.effect import PairedEffect, paired_effect, seeds_to_decide
from flows.history.records import Records, RunRecord, StageRecord
from flows.history.store_reader import StoreReader
from flows.history.trust import recorded_reader
from flows.reporting.comparison import compared_run


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
