"""Filter: which trajectories training sees, and why the others not."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pydantic import Field

from components.artifacts import Draft
from components.specs import Target
from components.trajectories.schema import SCHEMA_VERSION
from flows.stages.base import Context, Inputs, Stage, StageSpec


class FilterStage(StageSpec):
    filter_: Target = Field(alias="filter")

    def key_part(self) -> dict[str, Any]:
        return {"filter": self.filter_.resolved()}


def filter_(spec: FilterStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes `selection.parquet`. Inputs: `trajectories`, `scores`."""
    from components.filters.select import apply
    from components.trajectories.store import load_scored, write_selection

    trajectories = load_scored(
        inputs["trajectories"].path / "trajectories.parquet", inputs["scores"].path / "scores.parquet", None
    )
    selections = apply(spec.filter_.build(), trajectories)
    write_selection(draft.path / "selection.parquet", selections)
    context.progress(len(selections), len(selections))
    kept = sum(selection.kept for selection in selections)
    reasons = Counter(selection.reason for selection in selections if not selection.kept)
    return {
        "kept": float(kept),
        "dropped": float(len(selections) - kept),
        "kept_share": kept / len(selections) if selections else 0.0,
        **{f"dropped/{reason}": float(count) for reason, count in sorted(reasons.items())},
    }


STAGE = Stage("filter", 1, FilterStage, "selection", SCHEMA_VERSION, filter_)
