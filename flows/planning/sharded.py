"""Shards of a planned stage (`compute.shards`): which are cached, and the time and cost of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from components.artifacts import Artifact, Store
from components.compute.spec import ComputeSpec
from components.errors import EspalierError
from components.rollout.live_view import FILE as LIVE
from flows.execution.sharding import shard_count
from flows.stages import STAGES
from flows.stages.base import Context, Request, StagePart
from flows.stages.execute import stage_and_spec
from flows.stages.shard import shard_request


@dataclass(frozen=True)
class PlannedRows:
    """Number of rows of a planned stage."""

    count: int | None
    """Rows; None if unknown."""
    estimated: bool
    """True if the rows are those of a stage that has not run yet, by its settings."""


def planned_rows(
    request: Request, known: Mapping[str, Artifact], earlier: Sequence[tuple[Request, Artifact]], context: Context
) -> PlannedRows:
    """Return the rows of a stage that can be split: counted if the data are on this machine, else estimated by the
    number of episodes of the stage that plays them. known: stored artifacts by key. earlier: the stages planned before,
    with their artifacts."""
    sharding = STAGES[request.stage].sharding
    assert sharding is not None, request.stage
    inputs = {name: known.get(key) for name, key in request.inputs.items()}
    with suppress(EspalierError, OSError):  # unreachable, or in the remote store only
        if (count := sharding.rows(stage_and_spec(request)[1], inputs, context)) is not None:
            return PlannedRows(count, estimated=False)
    key = request.inputs.get("trajectories")
    source = next((before for before, artifact in earlier if artifact.key == key), None)
    return PlannedRows(None if source is None else STAGES[source.stage].episodes(source), estimated=True)


@dataclass(frozen=True)
class PlannedShard:
    """Planned shard of a stage."""

    label: str
    status: str
    """`cached`, `unfinished` or `run`, as for a stage."""
    seconds: float | None
    """Estimated time of the shard; 0 if cached, None if unknown."""
    cost: float | None
    """Cost of its machine and its judges. Shards in processes of one machine share its price equally."""
    key: str | None
    """Key; None if an input is pending."""


@dataclass(frozen=True)
class PlannedShards:
    """Planned shards of a stage."""

    shards: list[PlannedShard] = field(default_factory=list)
    """Shards; empty if the stage is cached, runs as a whole, or has an unknown number."""
    count: int | None = 1
    """Number of shards; None if unknown."""
    estimated: bool = False
    """True if the number depends on results of stages that are not cached (`compute.shard_rows`)."""


def planned_shards(
    label: str,
    request: Request,
    compute: ComputeSpec,
    *,
    status: Callable[[Request], tuple[str, str | None]],
    rows: Callable[[], PlannedRows],
    seconds: float | None,
) -> PlannedShards:
    """Return the shards of a stage without their costs. status: returns the status of a shard's request and its key.
    rows: returns the rows of the stage. seconds: estimated time of the whole stage in one process."""
    counted: list[PlannedRows] = []

    def count_rows() -> int | None:
        counted.append(rows())
        return counted[0].count

    count = shard_count(compute, request, count_rows)
    shards = []
    for index in range(count if count is not None and count > 1 else 0):
        part = StagePart(index, count or 1)
        state, key = status(shard_request(request, part))
        own = 0.0 if state == "cached" else None if seconds is None else seconds / part.count
        shards.append(PlannedShard(f"{label} {part}", state, own, None, key))
    return PlannedShards(shards, count, any(number.estimated for number in counted))


def wall_seconds(shards: Sequence[PlannedShard], compute: ComputeSpec) -> float | None:
    """Return the time of a stage whose shards run `compute.shard_workers` at a time, each equally long."""
    pending = [shard.seconds for shard in shards if shard.status != "cached"]
    known = [seconds for seconds in pending if seconds is not None]
    if len(known) < len(pending):
        return None
    return max(known, default=0.0) * math.ceil(len(pending) / compute.workers(max(1, len(pending))))


def pending_share(shards: Sequence[PlannedShard]) -> float:
    """Return the share of the stage that is not cached."""
    return sum(shard.status != "cached" for shard in shards) / len(shards)


def with_costs(shards: Sequence[PlannedShard], cost: float | None) -> list[PlannedShard]:
    """Return the shards with their equal shares of the cost of their stage; 0 for those that are cached."""
    pending = sum(shard.status != "cached" for shard in shards)
    share = None if cost is None else cost / max(1, pending)
    return [replace(shard, cost=0.0 if shard.status == "cached" else share) for shard in shards]


def has_scratch(store: Store, key: str) -> bool:
    """Return True if an interrupted attempt of the stage left files."""
    scratch = store.root / ".scratch" / key
    return scratch.is_dir() and any(path.name != LIVE for path in scratch.iterdir())
