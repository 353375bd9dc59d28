"""Filter stage: selects the trajectories to train on and records the reason for each dropped one. It streams from file
to file and reads the columns that the filter needs, with a batch of groups in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from components.artifacts import Draft
from components.specs import Target
from components.trajectories.groups import scenario_of
from components.trajectories.schema import SCHEMA_VERSION
from flows.stages import selections
from flows.stages.base import Context, Inputs, Stage, StageSpec, with_progress

if TYPE_CHECKING:
    import pyarrow as pa


class FilterStage(StageSpec):
    filter_: Target = Field(alias="filter")

    def key_part(self) -> dict[str, Any]:
        return {"filter": self.filter_.resolved()}


def filter_(spec: FilterStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `selection.parquet`. Inputs: `trajectories`, `scores`."""
    import numpy as np

    from components.filters.reasons import as_batch
    from components.filters.select import apply
    from components.trajectories.sources import ScoredFiles
    from components.trajectories.store import count_trajectories, write_selection_batches

    path = inputs["trajectories"].path / "trajectories.parquet"
    source = ScoredFiles(path, inputs["scores"].path / "scores.parquet")
    reasons: Counter[str | None] = Counter()
    scenarios: set[str] = set()

    def batches() -> Iterator[pa.RecordBatch]:
        for episodes, reasons_N in apply(spec.filter_.build(), source):
            reasons.update(reasons_N.tolist())
            selection = episodes.take(np.flatnonzero(np.equal(reasons_N, None)))
            scenarios.update(map(scenario_of, selection.group_names))
            yield as_batch(episodes, reasons_N)

    written = with_progress(batches(), count_trajectories(path), context.progress, len)
    total = write_selection_batches(draft.path / "selection.parquet", written)
    selected = reasons.pop(None, 0)
    return {
        "kept": float(selected),
        "scenarios": float(len(scenarios)),
        "dropped": float(total - selected),
        "kept_share": selected / total if total else 0.0,
        **{f"dropped/{reason}": float(count) for reason, count in sorted(reasons.items())},
    }


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
    summary=selections.summary_text,
    part_of_round=True,
    lineage="input",
)
