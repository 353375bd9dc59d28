"""Filter stage: selects the trajectories to train on and records the reason for each dropped one. It streams from file
to file and reads the columns that the filter needs, with a batch of groups in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from components.artifacts import Artifact, Draft
from components.specs import Target
from components.trajectories.groups import scenario_of
from components.trajectories.schema import SCHEMA_VERSION
from flows.stages import selections
from flows.stages.base import WHOLE, Context, Inputs, Sharding, Stage, StagePart, StageSpec, with_progress
from flows.stages.joining import count_input_rows

if TYPE_CHECKING:
    import pyarrow as pa


class FilterStage(StageSpec):
    filter_: Target = Field(alias="filter")

    def key_part(self) -> dict[str, Any]:
        return {"filter": self.filter_.resolved()}


def filter_(spec: FilterStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `selection.parquet`. Inputs: `trajectories`, `scores`."""
    return _select(spec, inputs, draft, context, WHOLE)


def _select(spec: FilterStage, inputs: Inputs, draft: Draft, context: Context, part: StagePart) -> dict[str, float]:
    """Write the decisions about the scenarios that begin in a part of the trajectories, and return the metrics."""
    import numpy as np

    from components.filters.reasons import as_batch
    from components.filters.select import apply
    from components.trajectories.sources import Scenarios, ScoredFiles, Source
    from components.trajectories.store import count_trajectories, write_selection_batches

    path = inputs["trajectories"].path / "trajectories.parquet"
    first, end = part.bounds(count_trajectories(path))
    source: Source = ScoredFiles(path, inputs["scores"].path / "scores.parquet")
    if part != WHOLE:
        source = Scenarios(source, first, end)
    reasons: Counter[str | None] = Counter()
    scenarios: set[str] = set()

    def batches() -> Iterator[pa.RecordBatch]:
        for episodes, reasons_N in apply(spec.filter_.build(), source):
            reasons.update(reasons_N.tolist())
            selection = episodes.take(np.flatnonzero(np.equal(reasons_N, None)))
            scenarios.update(map(scenario_of, selection.group_names))
            yield as_batch(episodes, reasons_N)

    written = with_progress(batches(), end - first, context.progress, len)
    write_selection_batches(draft.path / "selection.parquet", written)
    return _figures(reasons, len(scenarios))


def join_filter(
    spec: FilterStage, inputs: Inputs, shards: Sequence[Artifact], draft: Draft, context: Context
) -> dict[str, float]:
    """Write the decisions of all shards."""
    import pyarrow.compute as pc

    from components.trajectories.decode import texts
    from components.trajectories.store import selection_batches, write_selection_batches

    reasons: Counter[str | None] = Counter()

    def batches() -> Iterator[pa.RecordBatch]:
        for shard in shards:
            for batch in selection_batches(shard.path / "selection.parquet"):
                kept_N = batch.column("kept")
                counts = pc.value_counts(batch.column("reason").filter(pc.invert(kept_N)))
                reasons.update(
                    dict(zip(texts(counts.field("values")), counts.field("counts").to_pylist(), strict=True))
                )
                reasons[None] += kept_N.true_count
                yield batch

    write_selection_batches(draft.path / "selection.parquet", batches())
    return _figures(reasons, int(sum(shard.metrics["scenarios"] for shard in shards)))


def _figures(reasons: Counter[str | None], scenarios: int) -> dict[str, float]:
    """Return the metrics. reasons: numbers of episodes by the reason for which they are dropped, None for kept."""
    total, selected = reasons.total(), reasons[None]
    dropped = {reason: count for reason, count in reasons.items() if reason is not None}
    return {
        "kept": float(selected),
        "scenarios": float(scenarios),
        "dropped": float(total - selected),
        "kept_share": selected / total if total else 0.0,
        **{f"dropped/{reason}": float(count) for reason, count in sorted(dropped.items())},
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
    sharding=Sharding(_select, join_filter, count_input_rows, lambda spec: whole_collection(spec.filter_)),
    summary=selections.summary_text,
    part_of_round=True,
    lineage="input",
)
