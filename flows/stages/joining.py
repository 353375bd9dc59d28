"""Files and metrics of a stage that is joined from its shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from components.artifacts import Artifact
from components.errors import TooManyFailures
from components.json_text import read_json
from components.rewards.protocol import Comparing, GroupReward, Reward
from components.trajectories.groups import scenario_of
from components.trajectories.schema import Failure, Score, Trajectory
from flows.stages.base import WHOLE, Context, StagePart

SUMMED = ("tokens_per_s", "resumed", "retried")
"""Throughput metrics that shards add up to; `seconds` is that of the longest."""


FIGURES = ("spent", "calls", "kept_answers", "unpriced_calls", "prompt_tokens", "completion_tokens")
"""Metrics of the calls of judges."""


def of_shard(part: StagePart) -> str:
    """Return the suffix of a description for live views; empty for a whole stage."""
    return "" if part == WHOLE else f", {part}"


def count_input_rows(spec: object, inputs: Mapping[str, Artifact | None], context: Context) -> int | None:
    """Return the number of rows of the input `trajectories`; None if it is pending."""
    from components.trajectories.store import count_trajectories

    source = inputs["trajectories"]
    return None if source is None else count_trajectories(source.path / "trajectories.parquet")


def part_of_scenarios(rows: Iterable[Trajectory], total: int, part: StagePart) -> Iterator[Trajectory]:
    """Yield the trajectories of the scenarios whose first row is in a part of `total` rows. A scenario, with the groups
    that were played aside, is never split. Rows after the part are not read."""
    first, end = part.bounds(total)
    scenario, inside = None, False
    for number, row in enumerate(rows):
        if scenario_of(row.group) != scenario:
            scenario, inside = scenario_of(row.group), first <= number < end
            if number >= end:
                return
        if inside:
            yield row


def read_episodes(shards: Sequence[Artifact]) -> list[Trajectory]:
    """Return the episodes of all shards, in order."""
    from components.trajectories.store import read_trajectories

    return [row for shard in shards for row in read_trajectories(shard.path / "trajectories.parquet")]


def read_times(shards: Sequence[Artifact]) -> dict[str, float]:
    """Return the seconds of each episode by id."""
    times: dict[str, float] = {}
    for shard in shards:
        times |= read_json(shard.path / "times.json")
    return times


def joined_speed(shards: Sequence[Artifact]) -> dict[str, float]:
    """Return the throughput metrics of all shards; empty if none has any."""
    measured = [shard.metrics for shard in shards if "tokens_per_s" in shard.metrics]
    if not measured:
        return {}
    sums = {name: sum(metrics.get(name, 0.0) for metrics in measured) for name in SUMMED}
    return {"seconds": max(metrics["seconds"] for metrics in measured), **sums}


def summed(shards: Sequence[Artifact], names: Iterable[str]) -> dict[str, float]:
    """Return the sums of the metrics that a shard has."""
    present = [name for name in names if any(name in shard.metrics for shard in shards)]
    return {name: sum(shard.metrics.get(name, 0.0) for shard in shards) for name in present}


def read_scored_shards(shards: Sequence[Artifact]) -> Iterator[Score]:
    """Yield the scores of all shards, in order."""
    from components.trajectories.store import read_scores

    for artifact in shards:
        yield from read_scores(artifact.path / "scores.parquet")


def joined_figures(reward: Reward | GroupReward, shards: Sequence[Artifact], scores: Path) -> dict[str, float]:
    """Return what `RewardJudge.figures` and `agreement` return for a whole stage."""
    return summed(shards, FIGURES) | agreement_of(reward, scores)


def agreement_of(reward: Reward | GroupReward, path: Path) -> dict[str, float]:
    """Return the agreement between the sources of a reward on the scores of a file; empty for a reward with a single
    source."""
    from components.trajectories.store import read_scores

    if not isinstance(reward, Comparing):
        return {}
    return {f"agreement/{name}": value for name, value in reward.agreement(read_scores(path)).items()}


def refuse_failures(
    trajectories: Iterable[Trajectory], allowed: int, max_failures: float, stage: str, description: str
) -> None:
    """Raise TooManyFailures if more episodes failed than the whole stage allows. An episode and those derived from it
    count as at most one."""
    from components.trajectories.failures import failure_kinds

    failed: dict[tuple[str, int], tuple[str, Failure]] = {}
    total = set()
    for trajectory in trajectories:
        attempt = scenario_of(trajectory.group), trajectory.sample
        total.add(attempt)
        if trajectory.failure is not None:
            failed.setdefault(attempt, (trajectory.id, trajectory.failure))
    if len(failed) > allowed:
        causes = ". ".join(map(str, failure_kinds(failed.values())))
        raise TooManyFailures(
            f"{description}: {len(failed)} of {len(total)} episodes failed, more than the {allowed} that "
            f"max_failures={max_failures:g} of this stage allows. {causes}. "
            f"The same command retries the failed episodes; {stage}.max_failures sets how many may fail"
        )
