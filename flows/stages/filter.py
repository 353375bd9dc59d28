"""Filter: which trajectories training sees, and why the others not; from file to file, a group in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import Field

from components.artifacts import Draft
from components.specs import Target
from components.trajectories.groups import scenario_of
from components.trajectories.schema import SCHEMA_VERSION, Selection, Trajectory
from flows.stages.base import Context, Inputs, Stage, StageSpec, followed


class FilterStage(StageSpec):
    filter_: Target = Field(alias="filter")

    def key_part(self) -> dict[str, Any]:
        return {"filter": self.filter_.resolved()}


def filter_(spec: FilterStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes `selection.parquet`. Inputs: `trajectories`, `scores`."""
    from components.filters.select import apply
    from components.trajectories.store import count_trajectories, read_scored, write_selection

    path = inputs["trajectories"].path / "trajectories.parquet"
    reasons: Counter[str] = Counter()

    def counted(selections: Iterable[Selection]) -> Iterator[Selection]:
        for selection in selections:
            reasons[selection.reason] += not selection.kept
            group = waiting.pop(selection.trajectory_id)
            if selection.kept:
                scenarios.add(scenario_of(group))
            yield selection

    scenarios: set[str] = set()
    waiting: dict[str, str] = {}  # group by trajectory: of those whose selection is still to come

    def seen(trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
        for one in trajectories:
            waiting[one.id] = one.group
            yield one

    trajectories = seen(read_scored(path, inputs["scores"].path / "scores.parquet"))
    selections = counted(apply(spec.filter_.build(), trajectories))
    total = write_selection(
        draft.path / "selection.parquet", followed(selections, count_trajectories(path), context.progress)
    )
    kept = total - reasons.total()
    return {
        "kept": float(kept),
        "scenarios": float(len(scenarios)),
        "dropped": float(total - kept),
        "kept_share": kept / total if total else 0.0,
        **{f"dropped/{reason}": float(count) for reason, count in sorted(reasons.items()) if count},
    }


STAGE = Stage("filter", 2, FilterStage, "selection", SCHEMA_VERSION, filter_)
