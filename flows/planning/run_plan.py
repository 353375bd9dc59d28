"""Plan of a run as data: its stages with times and costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from flows.planning.sharded import PlannedShard


@dataclass(frozen=True)
class PlannedStage:
    """Planned stage."""

    label: str
    seed: int
    """Seed of the run."""
    stage: str
    step: int
    inputs: dict[str, str]
    """Label of the stage that produces each input, by input name."""
    status: str
    """`cached`: in the store, or produced by an earlier stage of this run. `unfinished`: an interrupted attempt can be
    resumed. `run`: not cached."""
    why: list[str]
    """Reasons why the stage is not cached: differences from the most similar earlier stage."""
    where: str
    """Name of the place; for a remote machine also the requested resources."""
    seconds: float | None
    """Estimated time; 0 if cached, None if no similar stage has run with the same model."""
    cost: float | None
    """Cost of the machine, by the prices in `compute`, and of judges; None if the time or a price is unknown."""
    key: str | None
    """Stage key; None if an input is pending."""
    beside: str | None = None
    """Label of the stage beside which it runs in the background; None if the run waits for it."""
    overlapped_seconds: float = 0.0
    """Seconds that overlap with the stage beside it, for which the run does not wait."""
    episodes: int | None = None
    """Maximum number of episodes, including second attempts, continuations, and those of other players and a teacher.
    None for other stages, and for an evaluation on all scenarios of its split."""
    shards: list[PlannedShard] = field(default_factory=list)
    """Shards of a stage that is not cached (`compute.shards`); empty if it runs as a whole. Time and cost of the stage
    include theirs."""
    shard_count: int | None = 1
    """Number of shards; None if it depends on rows that are unknown (`compute.shard_rows`)."""
    shard_count_estimated: bool = False
    """True if the number of shards depends on results of stages that are not cached."""


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run, or of the runs of several seeds."""

    experiment: str
    root: str
    stages: list[PlannedStage]
    notes: list[str] = field(default_factory=list)
    """Messages on the course of the run: missing prerequisites, early stopping, guards, the choice of the policy."""
    at_most: bool = False
    """True if the run may end before the last of these stages."""
    seeds: list[int] = field(default_factory=list)
    """Seeds of the runs, in their order."""
    new: bool = False
    """True if there are earlier runs, and none of this experiment."""

    def count(self, status: str) -> int:
        """Return the number of stages with this status."""
        return sum(stage.status == status for stage in self.stages)

    @property
    def seconds(self) -> float | None:
        """Estimated time of all runs; None if that of a stage is unknown."""
        return total(
            None if stage.seconds is None else stage.seconds - stage.overlapped_seconds for stage in self.stages
        )

    @property
    def cost(self) -> float | None:
        """Estimated cost of all runs; None if that of a stage is unknown."""
        return total(stage.cost for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {**asdict(self), "seconds": self.seconds, "cost": self.cost}


def total(values: Iterator[float | None]) -> float | None:
    """Return the sum of the values; None if one is None."""
    summands = list(values)
    return None if None in summands else sum(value for value in summands if value is not None)
