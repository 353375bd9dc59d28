"""Filter stage: selects the trajectories to train on and records the reason for each dropped one. It streams from file
to file, with one group in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from components.artifacts import Artifact, Draft
from components.specs import Target
from components.trajectories.groups import scenario_of
from components.trajectories.schema import SCHEMA_VERSION, Selection, Trajectory
from flows.stages import selections
from flows.stages.base import WHOLE, Context, Inputs, Sharding, Stage, StagePart, StageSpec, with_progress
from flows.stages.joining import part_of_scenarios


class FilterStage(StageSpec):
    filter_: Target = Field(alias="filter")

    def key_part(self) -> dict[str, Any]:
        return {"filter": self.filter_.resolved()}


def filter_(spec: FilterStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `selection.parquet`. Inputs: `trajectories`, `scores`."""
    return _select(spec, inputs, draft, context, WHOLE)


def _select(spec: FilterStage, inputs: Inputs, draft: Draft, context: Context, part: StagePart) -> dict[str, float]:
    """Write the decisions about the scenarios that begin in a part of the trajectories, and return the metrics."""
    from components.filters.select import apply
    from components.trajectories.store import count_trajectories, read_scored, write_selection

    path = inputs["trajectories"].path / "trajectories.parquet"
    scores = inputs["scores"].path / "scores.parquet"
    rows = count_trajectories(path)
    first, end = part.bounds(rows)
    reasons: Counter[str] = Counter()
    scenarios: set[str] = set()

    def read() -> Iterator[Trajectory]:
        scored = read_scored(path, scores, components=True)
        return scored if part == WHOLE else part_of_scenarios(scored, rows, part)

    def selections() -> Iterator[Selection]:
        for trajectory, selection in apply(spec.filter_.build(), read):
            if selection.kept:
                scenarios.add(scenario_of(trajectory.group))
            else:
                reasons[selection.reason] += 1
            yield selection

    total = write_selection(
        draft.path / "selection.parquet", with_progress(selections(), end - first, context.progress)
    )
    return _figures(total, len(scenarios), reasons)


def join_filter(
    spec: FilterStage, inputs: Inputs, shards: Sequence[Artifact], draft: Draft, context: Context
) -> dict[str, float]:
    """Write the decisions of all shards."""
    from components.trajectories.store import read_selection, write_selection

    reasons: Counter[str] = Counter()

    def selections() -> Iterator[Selection]:
        for shard in shards:
            for selection in read_selection(shard.path / "selection.parquet"):
                reasons.update(() if selection.kept else (selection.reason,))
                yield selection

    total = write_selection(draft.path / "selection.parquet", selections())
    return _figures(total, int(sum(shard.metrics["scenarios"] for shard in shards)), reasons)


def _figures(total: int, scenarios: int, reasons: Counter[str]) -> dict[str, float]:
    selected = total - reasons.total()
    return {
        "kept": float(selected),
        "scenarios": float(scenarios),
        "dropped": float(total - selected),
        "kept_share": selected / total if total else 0.0,
        **{f"dropped/{reason}": float(count) for reason, count in sorted(reasons.items())},
    }


def whole_collection(filter_: Target) -> str | None:
    """Return the reason why the decisions of a filter cannot be split; None if they can."""
    from components.filters.protocol import decides_per_group

    if decides_per_group(filter_.build()):
        return None
    return "has a filter that compares the episodes of the whole collection"


STAGE = Stage(
    "filter",
    3,
    FilterStage,
    "selection",
    SCHEMA_VERSION,
    filter_,
    files={"selection.parquet": "kept and dropped episodes, with reasons"},
    inputs={"trajectories": "trajectories or dataset", "scores": "scores or dataset"},
    order=30,
    unit="decisions",
    sharding=Sharding(_select, join_filter, lambda spec: whole_collection(spec.filter_)),
    summary=selections.summary_text,
    part_of_round=True,
    lineage="input",
)
