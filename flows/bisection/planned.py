"""Plan of one step of a bisection: its stages with their keys, time and price."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flows.experiment.spec import ExperimentSpec
from flows.history.records import RunRecord
from flows.planning.plan import plan
from flows.planning.run_plan import PlannedStage
from flows.terminal.console import duration


@dataclass(frozen=True)
class PlannedStep:
    """Planned run."""

    stages: tuple[PlannedStage, ...]
    seconds: float | None
    """Expected time of the stages with a known one; None if none of those to run is known."""
    cost: float | None
    """Expected price of the stages with a known one; None if none of those to run is known."""
    unknown: int
    """Number of stages to run whose time is unknown."""

    @property
    def pending(self) -> int:
        """Number of stages to run."""
        return sum(stage.status != "cached" for stage in self.stages)

    @property
    def order(self) -> tuple[float, float, int]:
        """Sort key: price, time, number of stages to run."""
        return self.cost or 0.0, self.seconds or 0.0, self.pending

    def same_as(self, other: PlannedStep) -> bool:
        """Return True if both runs have the same stages with the same known keys."""
        keys, others = ({stage.label: stage.key for stage in step.stages} for step in (self, other))
        return None not in keys.values() and keys == others

    def repeats(self, run: RunRecord, same_root: bool) -> bool:
        """Return True if the stages are those of a recorded run, so that the run would have its result. same_root: the
        plan is for the root of the run; for another root, all stages must be cached there."""
        recorded = {stage.label: stage.key for stage in run.stages}
        known = [stage for stage in self.stages if stage.key is not None]
        if any(recorded.get(stage.label) != stage.key for stage in known):
            return False
        return (same_root or len(known) == len(self.stages)) and (
            same_root or all(stage.status == "cached" for stage in self.stages)
        )

    def text(self) -> str:
        """Return the plan as text."""
        if not self.pending:
            return f"all {len(self.stages)} stages cached"
        time = "time unknown" if self.seconds is None else duration(self.seconds)
        least = "at least " if self.unknown and self.seconds is not None else ""
        cost = "price unknown" if self.cost is None else f"price {self.cost:.2f}"
        return f"{self.pending} of {len(self.stages)} stages to run, {least}{time}, {cost}"


def plan_step(spec: ExperimentSpec, root: Path, similar: RunRecord) -> PlannedStep:
    """Return the plan of a run. similar: run whose stages of the same label give the times that the plan lacks."""
    stages = plan(spec).stages
    recorded = {stage.label: stage for stage in similar.stages}
    seconds, costs, unknown = [], [], 0
    for stage in stages:
        if stage.status == "cached":
            continue
        time, cost = stage.seconds, stage.cost
        earlier = recorded.get(stage.label)
        if time is None and earlier is not None and earlier.status == "ran":
            time, cost = earlier.seconds, earlier.cost
        unknown += time is None
        seconds += [] if time is None else [time - stage.overlapped_seconds]
        costs += [] if cost is None else [cost]
    pending = any(stage.status != "cached" for stage in stages)
    return PlannedStep(
        tuple(stages),
        None if pending and not seconds else sum(seconds),
        None if pending and not costs else sum(costs),
        unknown,
    )
