"""Filter stage: selects the trajectories to train on and records the reason for each dropped one. It streams from file
to file, with one group in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from components.artifacts import Draft
from components.specs import Target
from components.trajectories.groups import scenario_of
from components.trajectories.schema import SCHEMA_VERSION, Selection
from flows.stages import selections
from flows.stages.base import Context, Inputs, Stage, StageSpec, with_progress


class FilterStage(StageSpec):
    filter_: Target = Field(alias="filter")

    def key_part(self) -> dict[str, Any]:
        return {"filter": self.filter_.resolved()}


def filter_(spec: FilterStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `selection.parquet`. Inputs: `trajectories`, `scores`."""
    from components.filters.select import apply
    from components.trajectories.store import count_trajectories, read_scored, write_selection

    path = inputs["trajectories"].path / "trajectories.parquet"
    scores = inputs["scores"].path / "scores.parquet"
    reasons: Counter[str] = Counter()
    scenarios: set[str] = set()

    def selections() -> Iterator[Selection]:
        for trajectory, selection in apply(spec.filter_.build(), lambda: read_scored(path, scores, components=True)):
            if selection.kept:
                scenarios.add(scenario_of(trajectory.group))
            else:
                reasons[selection.reason] += 1
            yield selection

    total = write_selection(
        draft.path / "selection.parquet", with_progress(selections(), count_trajectories(path), context.progress)
    )
    selected = total - reasons.total()
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
